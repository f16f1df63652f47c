import sys; sys.path.insert(0,".")
import torch, time
from lohan_fx.runtime.optimizer import *
torch.set_num_threads(1)
n=200
def best(f,k=30):
    b=9
    for _ in range(k):
        t=time.perf_counter(); f(); b=min(b,time.perf_counter()-t)
    return b/n*1e6
for dev in (["cpu","cuda"] if torch.cuda.is_available() else ["cpu"]):
  for name,kw in [("AdamW",{}),("AdamW",{"foreach":True}),("AdamW",{"fused":True}),("SGD",{"momentum":.9}),("RMSprop",{})]:
    cls=getattr(torch.optim,name)
    params=[torch.nn.Parameter(torch.ones(16,device=dev)) for _ in range(n)]
    o=cls(params,lr=.1,**kw)
    for p in params: p.grad=torch.ones_like(p)
    masters=[p.detach().clone() for p in params]; grads=[torch.ones_like(p) for p in params]
    u=UnitOptimizer(o,params)
    st=[{k:torch.zeros_like(m) for k in u.state_names()} for m in masters]
    sync=torch.cuda.synchronize if dev=="cuda" else (lambda:None)
    def plain(): o.step(); sync()
    def unit(): u.step(masters,grads,st); sync()
    bf=[g.bfloat16() for g in grads]; cp=[g.bfloat16() for g in grads]
    def mixed(): u.step_mixed(masters,bf,st,cp); sync()
    plain(); unit(); mixed()
    a,b,c=best(plain),best(unit),best(mixed)
    print(f"{dev} {name} {kw}: plain {a:.2f} us/param, unit {b:.2f} (+{b-a:.2f}), mixed {c:.2f}")
t=time.perf_counter(); UnitOptimizer(torch.optim.AdamW(params),params); print("construct us",(time.perf_counter()-t)*1e6)
one=[params[0]]; o=torch.optim.AdamW(one); u=UnitOptimizer(o,one); st=[{k:torch.zeros_like(masters[0]) for k in u.state_names()}]
n=1
if dev=="cpu":
    one[0].grad=grads[0]; print("1-param unit", best(lambda:u.step(masters[:1],grads[:1],st)), "plain", best(lambda:o.step()))
    for k in (24_000_000,):
        p=torch.nn.Parameter(torch.zeros(k)); 
        for kw in ({},{"fused":True}):
            for thr in (1,2):
                torch.set_num_threads(thr)
                o=torch.optim.AdamW([p],**kw); u=UnitOptimizer(o,[p]); m=[torch.zeros(k)]; g=[torch.full((k,),.1)]; s=[{q:torch.zeros(k) for q in u.state_names()}]; p.grad=g[0]
                gb=[g[0].bfloat16()]; cb=[g[0].bfloat16()]
                fs=[lambda:o.step(), lambda:u.step(m,g,s), lambda:u.step_mixed(m,gb,s,cb)]
                for f in fs: f()
                print(kw,"threads",thr,"24M elements, ms: plain %.1f unit %.1f mixed bf16 %.1f"%tuple(best(f,4)/1e3 for f in fs))
