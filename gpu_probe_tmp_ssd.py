import ctypes, mmap, os, sys, tempfile, time, warnings, shutil
sys.path.insert(0, os.getcwd())
import torch
from contextlib import closing
from lohan_fx.runtime import _memory, arena as A
from lohan_fx.runtime.ssd import *
print(torch.__version__, torch.cuda.get_device_name(), open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip(), open("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read().strip())
print("cudart names", [n for n in dir(torch.cuda.cudart()) if "rr" in n or "Host" in n])
x = torch.ones(3, device="cuda"); torch.cuda.synchronize()
print("avail", A.available_host_bytes()/2**30)
GB = 1 << 30
def t(label, f, nbytes=None):
    s = time.perf_counter(); r = f(); d = time.perf_counter() - s
    print(f"{label}: {d:.3f} s" + (f" {nbytes/d/1e9:.2f} GB/s" if nbytes else "")); return r
n = 16 * GB
a = t("Arena 16 GiB", lambda: A.Arena(n, pin=True), n)
t("register 16x1GiB", lambda: [a.register(i*GB, GB) for i in range(16)], n)
d = torch.empty(4*GB, dtype=torch.uint8, device="cuda")
def h2d():
    for i in range(4): d[i*GB:(i+1)*GB].copy_(a.view(i*GB, GB), non_blocking=True)
    torch.cuda.synchronize()
t("h2d", h2d, 4*GB); t("h2d", h2d, 4*GB)
def adam(base):
    k = 1<<29
    p, g, m, v = [base[i*4*k:(i+1)*4*k].view(torch.float32) for i in range(4)]
    st = [torch.tensor(1.0)]
    f = lambda: torch._fused_adamw_([p],[g],[m],[v],[],st,lr=1e-3,beta1=.9,beta2=.99,weight_decay=0.,eps=1e-8,amsgrad=False,maximize=False)
    f()
    t("adam", f, 28*k); t("adam", f, 28*k)
adam(a.view(0, n))
ok = torch.cuda.cudart()
# refusal leaves error?
w = A.PageLocker(); print("refusal:", repr(w.lock(a.view(0,1).data_ptr(), 4096)))
try: print("next kernel", torch.ones(3, device="cuda").sum().item())
except Exception as e: print("next kernel RAISES", type(e), str(e)[:200])
try: print("next kernel", torch.ones(3, device="cuda").sum().item())
except Exception as e: print("second RAISES", str(e)[:100])
t("close", a.close); del a
# private + THP
mm = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS); mm.madvise(mmap.MADV_HUGEPAGE)
pt = torch.frombuffer(mm, dtype=torch.uint8); ad = pt.data_ptr()
t("private THP touch", lambda: A._touch(ad, n), n)
t("register private", lambda: [w.lock(ad+i*GB, GB) for i in range(16)], n)
adam(pt)
[w.unlock(ad+i*GB) for i in range(16)]
del pt, mm
# ssd
os.makedirs("/tmp/ssdprobe", exist_ok=True); os.makedirs("/tmp/ssdprobe2", exist_ok=True)
b = A.Arena(4*GB, pin=False)
buf = b.view(0, 4*GB); buf.fill_(3)
for dirs in (["/tmp/ssdprobe"], ["/tmp/ssdprobe","/tmp/ssdprobe2"]):
  for th in (1, 4, 8):
    run = RunDirectory(dirs); pool = IoPool(th)
    f = t("create 4GiB", lambda: StripedFile(run, "f", 4*GB, pool))
    print(dirs, th, "direct", run.direct)
    t("write", lambda: f.pwrite(buf, 0), 4*GB); t("rewrite", lambda: f.pwrite(buf, 0), 4*GB); t("read", lambda: f.pread(buf, 0), 4*GB)
    print(pool.counters)
    f.close(); pool.close(); run.close()
b.close()
