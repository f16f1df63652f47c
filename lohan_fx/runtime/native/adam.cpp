// One pass over a unit: Adam or AdamW on fp32 masters from gradients of any floating dtype, and
// the rounded compute copy; and sums of gradients. The update moves 28 bytes a parameter with bf16 gradients and copies
// (the floor of LoHan's cpu lane); separate casts would move 12 more.
//
// The arithmetic is that of torch's fused CPU kernels, operation by operation, as its vector code
// is compiled (multiply-adds are contracted where they are here), so that results are the same
// bits; tests compare them. Elements behind the last full vector round as torch's scalar code does.
// Contraction is written out: build with -ffp-contract=off.
//
// Threads are ours and sleep between calls: OpenMP's would spin on cores that launch GPU kernels,
// and would be shared with torch's own kernels.

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kPiece = 1 << 15;  // elements that a thread takes at a time
constexpr int64_t kBlock = 1 << 10;  // elements whose cast gradients stay in the L1 cache

enum Dtype : int32_t { kNone = 0, kFloat = 1, kBfloat16 = 2, kHalf = 3 };

float from_bf16(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

uint16_t to_bf16(float x) {  // to nearest, ties to even; NaN becomes torch's 0x7fc0
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

#if defined(__FLT16_MAX__)
float from_half(uint16_t x) {
  _Float16 half;
  std::memcpy(&half, &x, 2);
  return static_cast<float>(half);
}

uint16_t to_half(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#else  // an older compiler: `lohan_has_half` says so, and these are not called
float from_half(uint16_t) { return 0.0f; }
uint16_t to_half(float) { return 0; }
#endif

}  // namespace

extern "C" {

struct Tensors {  // one parameter; mirrored by adam.py
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null: not amsgrad
  const void* gradient;
  void* copy;  // null: none
  int64_t size;
  int64_t tail;  // elements behind torch's last full vector
  int32_t gradient_dtype;
  int32_t copy_dtype;
  double lr, beta1, beta2, eps, weight_decay;
  double step;
  int32_t decoupled;  // AdamW
  int32_t maximize;
  float factor, limit;  // of the gradient, before all else; 1 and infinity do nothing
};

}  // extern "C"

namespace {

struct Scalars {
  float decay, lerp, beta2, rest2, root, eps, step_size, weight_decay;
  bool lerp_small;
};

Scalars scalars_of(const Tensors& t) {
  const double correction1 = 1 - std::pow(t.beta1, t.step);
  const double correction2 = 1 - std::pow(t.beta2, t.step);
  Scalars s;
  s.decay = static_cast<float>(1 - t.lr * t.weight_decay);
  s.lerp = static_cast<float>(1 - t.beta1);
  s.lerp_small = std::fabs(s.lerp) < 0.5f;
  s.beta2 = static_cast<float>(t.beta2);
  s.rest2 = static_cast<float>(1 - t.beta2);
  s.root = static_cast<float>(std::sqrt(correction2));
  s.eps = static_cast<float>(t.eps);
  s.step_size = static_cast<float>(-(t.lr / correction1));
  s.weight_decay = static_cast<float>(t.weight_decay);
  return s;
}

template <bool tail, bool amsgrad, bool decoupled, bool decays, bool small>
void update(const Tensors& t, const Scalars& s, int64_t begin, int64_t n, const float* gradient) {
  float* __restrict p = t.master + begin;
  float* __restrict m = t.exp_avg + begin;
  float* __restrict v = t.exp_avg_sq + begin;
  float* __restrict x = amsgrad ? t.max_exp_avg_sq + begin : nullptr;
  const float* __restrict g = gradient;
  const float sign = t.maximize ? -1.0f : 1.0f;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float param = p[i];
    float grad = g[i] * sign;
    if (decays && !decoupled) grad = __builtin_fmaf(param, s.weight_decay, grad);
    if (decays && decoupled) param = param * s.decay;
    const float difference = grad - m[i];
    m[i] = small ? __builtin_fmaf(s.lerp, difference, m[i])
                 : __builtin_fmaf(s.lerp - 1.0f, difference, grad);
    const float share = s.rest2 * grad;
    v[i] = tail ? __builtin_fmaf(s.beta2, v[i], share * grad)
                : __builtin_fmaf(share, grad, s.beta2 * v[i]);
    float second = v[i];
    if (amsgrad) {
      // a NaN of the second goes through torch's vector maximum, and not through std::max
      x[i] = tail ? (x[i] < second ? second : x[i]) : (x[i] > second ? x[i] : second);
      second = x[i];
    }
    const float denominator = std::sqrt(second) / s.root + s.eps;
    p[i] = param + s.step_size * m[i] / denominator;
  }
}

using Update = void (*)(const Tensors&, const Scalars&, int64_t, int64_t, const float*);

template <bool tail>
Update choose(const Tensors& t, const Scalars& s) {
  static constexpr Update table[16] = {
      update<tail, 0, 0, 0, 0>, update<tail, 0, 0, 0, 1>, update<tail, 0, 0, 1, 0>,
      update<tail, 0, 0, 1, 1>, update<tail, 0, 1, 0, 0>, update<tail, 0, 1, 0, 1>,
      update<tail, 0, 1, 1, 0>, update<tail, 0, 1, 1, 1>, update<tail, 1, 0, 0, 0>,
      update<tail, 1, 0, 0, 1>, update<tail, 1, 0, 1, 0>, update<tail, 1, 0, 1, 1>,
      update<tail, 1, 1, 0, 0>, update<tail, 1, 1, 0, 1>, update<tail, 1, 1, 1, 0>,
      update<tail, 1, 1, 1, 1>,
  };
  return table[8 * (t.max_exp_avg_sq != nullptr) + 4 * (t.decoupled != 0) +
               2 * (t.weight_decay != 0) + s.lerp_small];
}

// What torch's mul_ and clamp_ do to a float32 gradient; a NaN stays one.
void clip(const Tensors& t, const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float x = from[i] * t.factor;
    const float low = x < -t.limit ? -t.limit : x;
    to[i] = low > t.limit ? t.limit : low;
  }
}

void run_piece(const Tensors& t, const Scalars& s, Update body, Update tail, int64_t begin,
               int64_t end) {
  float cast[kBlock];
  const int64_t first_of_tail = t.size - t.tail;
  const bool clips = t.factor != 1.0f || t.limit < INFINITY;
  for (int64_t at = begin, n; at < end; at += n) {
    const Update call = at < first_of_tail ? body : tail;
    const int64_t stop = at < first_of_tail && end > first_of_tail ? first_of_tail : end;
    n = stop - at < kBlock ? stop - at : kBlock;
    const float* gradient = cast;
    if (t.gradient_dtype == kFloat) {
      gradient = static_cast<const float*>(t.gradient) + at;
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(t.gradient) + at;
      if (t.gradient_dtype == kBfloat16) {
        for (int64_t i = 0; i < n; i++) cast[i] = from_bf16(from[i]);
      } else {
        for (int64_t i = 0; i < n; i++) cast[i] = from_half(from[i]);
      }
    }
    if (clips) {
      clip(t, gradient, cast, n);
      gradient = cast;
    }
    call(t, s, at, n, gradient);
    if (t.copy == nullptr) continue;
    const float* master = t.master + at;
    if (t.copy_dtype == kBfloat16) {
      uint16_t* to = static_cast<uint16_t*>(t.copy) + at;
      for (int64_t i = 0; i < n; i++) to[i] = to_bf16(master[i]);
    } else if (t.copy_dtype == kHalf) {
      uint16_t* to = static_cast<uint16_t*>(t.copy) + at;
      for (int64_t i = 0; i < n; i++) to[i] = to_half(master[i]);
    } else {
      std::memcpy(static_cast<float*>(t.copy) + at, master, n * sizeof(float));
    }
  }
}

struct Work {  // what threads share
  virtual void work() = 0;
  virtual ~Work() = default;
};

struct Sum : Work {  // total += gradient, in pieces that threads take in turn
  float* total;
  const void* gradient;
  int32_t dtype;
  int64_t size;
  std::atomic<int64_t> next{0};

  Sum(float* to, const void* from, int32_t kind, int64_t n)
      : total(to), gradient(from), dtype(kind), size(n) {}

  void work() override {
    for (int64_t at = kPiece * next++; at < size; at = kPiece * next++) {
      const int64_t end = at + kPiece < size ? at + kPiece : size;
      if (dtype == kFloat) {
        const float* from = static_cast<const float*>(gradient);
        for (int64_t i = at; i < end; i++) total[i] += from[i];
      } else if (dtype == kBfloat16) {
        const uint16_t* from = static_cast<const uint16_t*>(gradient);
        for (int64_t i = at; i < end; i++) total[i] += from_bf16(from[i]);
      } else {
        const uint16_t* from = static_cast<const uint16_t*>(gradient);
        for (int64_t i = at; i < end; i++) total[i] += from_half(from[i]);
      }
    }
  }
};

struct Call : Work {  // one update, in pieces that threads take in turn
  const Tensors* tensors;
  std::vector<Scalars> scalars;
  std::vector<Update> bodies, tails;
  std::vector<int64_t> first;  // of each tensor: its first piece
  int64_t pieces = 0;
  std::atomic<int64_t> next{0};

  Call(const Tensors* given, int64_t count) : tensors(given) {
    for (int64_t i = 0; i < count; i++) {
      scalars.push_back(scalars_of(given[i]));
      bodies.push_back(choose<false>(given[i], scalars.back()));
      tails.push_back(choose<true>(given[i], scalars.back()));
      first.push_back(pieces);
      pieces += (given[i].size + kPiece - 1) / kPiece;
    }
  }

  void work() override {
    size_t at = 0;
    for (int64_t k = next++; k < pieces; k = next++) {
      while (at + 1 < first.size() && first[at + 1] <= k) at++;
      const Tensors& t = tensors[at];
      const int64_t begin = (k - first[at]) * kPiece;
      const int64_t end = begin + kPiece < t.size ? begin + kPiece : t.size;
      run_piece(t, scalars[at], bodies[at], tails[at], begin, end);
    }
  }
};

class Pool {
 public:
  explicit Pool(int threads) {
    try {
      for (int i = 1; i < threads; i++) threads_.emplace_back([this] { loop(); });
    } catch (...) {
      close();
      throw;
    }
  }

  ~Pool() { close(); }

  void run(Work& work) {
    std::lock_guard<std::mutex> one_at_a_time(callers_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      running_ = static_cast<int>(threads_.size());
      turn_++;
    }
    wake_.notify_all();
    work.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    work_ = nullptr;
  }

 private:
  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void loop() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return closed_ || turn_ != seen; });
      if (closed_) return;
      seen = turn_;
      Work* work = work_;
      lock.unlock();
      work->work();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_, callers_;
  std::condition_variable wake_, done_;
  Work* work_ = nullptr;
  uint64_t turn_ = 0;
  int running_ = 0;
  bool closed_ = false;
};

}  // namespace

extern "C" {

void* lohan_pool_new(int threads) {
  try {
    return new Pool(threads);
  } catch (...) {
    return nullptr;
  }
}

int lohan_has_half() {
#if defined(__FLT16_MAX__)
  return 1;
#else
  return 0;
#endif
}

void lohan_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

void lohan_add(void* pool, float* total, const void* gradient, int32_t dtype, int64_t size) {
  Sum sum(total, gradient, dtype, size);
  static_cast<Pool*>(pool)->run(sum);
}

// Returns 0, or 1 if there was no memory for the call (nothing is changed then).
int lohan_adam(void* pool, const Tensors* tensors, int64_t count) {
  try {
    Call call(tensors, count);
    static_cast<Pool*>(pool)->run(call);
  } catch (...) {
    return 1;
  }
  return 0;
}
}
