// One pass over a unit: Adam or AdamW on fp32 masters from gradients of any floating dtype, and
// the rounded compute copy; and sums of gradients. The update moves 28 bytes a parameter with bf16
// gradients and copies (the floor of LoHan's cpu lane); separate casts would move 12 more. What is
// written elsewhere than it was read goes past the caches, or it would be read first: 12 more again.
// The last gradient of a sum is added in the update's own pass: 32 bytes, not 10 and then 30; there
// also the sum of its squares is taken, which clipping by the norm needs.
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

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPiece = 1 << 15;  // elements that a thread takes at a time
// Elements of a block, which stays in the L1 cache from its cast gradients to its results. Short
// blocks mix reads and streamed writes finely. 61M parameters on two cores of an Emerald Rapids:
// updated in place 40 ms with blocks of 1024, 38 with 128; with results elsewhere 52 with 1024, 41
// with 64.
constexpr int64_t kBlock = 1 << 7;
constexpr int64_t kMovedBlock = 1 << 6;
constexpr int64_t kAddedBlock = 1 << 10;  // the order in which squares are added up depends on it

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

// Copies to memory that is not read soon, without reading it first (where there are such stores).
void stream(void* to, const void* from, int64_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
#if defined(__AVX512F__)
  constexpr int64_t kWidth = 64;
#elif defined(__AVX__)
  constexpr int64_t kWidth = 32;
#else
  constexpr int64_t kWidth = 1;
#endif
  const int64_t past = reinterpret_cast<uintptr_t>(out) % kWidth;
  const int64_t head = past == 0 ? 0 : (kWidth - past < bytes ? kWidth - past : bytes);
  std::memcpy(out, in, head);
  int64_t at = head;
#if defined(__AVX512F__)
  for (; at + kWidth <= bytes; at += kWidth)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + at), _mm512_loadu_si512(in + at));
#elif defined(__AVX__)
  for (; at + kWidth <= bytes; at += kWidth)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at)));
#endif
  std::memcpy(out + at, in + at, bytes - at);
}

// Orders streamed stores before what tells others that they are done.
void end_streams() {
#if defined(__AVX512F__) || defined(__AVX__)
  _mm_sfence();
#endif
}

}  // namespace

extern "C" {

struct Tensors {  // one parameter; mirrored by adam.py
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null: not amsgrad
  float* new_master;      // null: all is updated in place; else where the results go
  float* new_exp_avg;
  float* new_exp_avg_sq;
  float* new_max_exp_avg_sq;
  const float* sum;  // null: none; else the gradient is added to it, and it stays as it is
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
  double squares;       // of the gradient with its sum, before factor and limit, if asked for
};

struct Part {  // one parameter's gradient, to be added; mirrored by adam.py
  float* total;
  const void* gradient;
  int64_t size;
  int32_t dtype;
  int32_t begins;  // the total begins with this gradient: what was there is not read
  double squares;  // of the new totals, if they are asked for
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

struct State {  // some elements of a parameter
  float* p;
  float* m;
  float* v;
  float* x;  // null: not amsgrad
};

// `to` is `from`, or elsewhere.
template <bool tail, bool amsgrad, bool decoupled, bool decays, bool small>
void update(const State& from, const State& to, const Scalars& s, int64_t n, const float* g,
            float sign) {
  const float *p = from.p, *m = from.m, *v = from.v, *x = from.x;
  float *new_p = to.p, *new_m = to.m, *new_v = to.v, *new_x = to.x;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; i++) {
    float param = p[i];
    float grad = g[i] * sign;
    if (decays && !decoupled) grad = __builtin_fmaf(param, s.weight_decay, grad);
    if (decays && decoupled) param = param * s.decay;
    const float difference = grad - m[i];
    const float first = small ? __builtin_fmaf(s.lerp, difference, m[i])
                              : __builtin_fmaf(s.lerp - 1.0f, difference, grad);
    const float share = s.rest2 * grad;
    float second = tail ? __builtin_fmaf(s.beta2, v[i], share * grad)
                        : __builtin_fmaf(share, grad, s.beta2 * v[i]);
    new_m[i] = first;
    new_v[i] = second;
    if (amsgrad) {
      // a NaN of the second goes through torch's vector maximum, and not through std::max
      second = tail ? (x[i] < second ? second : x[i]) : (x[i] > second ? x[i] : second);
      new_x[i] = second;
    }
    const float denominator = std::sqrt(second) / s.root + s.eps;
    new_p[i] = param + s.step_size * first / denominator;
  }
}

using Update = void (*)(const State&, const State&, const Scalars&, int64_t, const float*, float);

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

// The gradients from `at` on in float32: `from` itself, or cast into `cast`.
const float* in_float(const void* from, int32_t dtype, int64_t at, int64_t n, float* cast) {
  if (dtype == kFloat) return static_cast<const float*>(from) + at;
  const uint16_t* halves = static_cast<const uint16_t*>(from) + at;
  if (dtype == kBfloat16) {
    for (int64_t i = 0; i < n; i++) cast[i] = from_bf16(halves[i]);
  } else {
    for (int64_t i = 0; i < n; i++) cast[i] = from_half(halves[i]);
  }
  return cast;
}

// A sum of squares, in double. Eight sums side by side, so that it is vectorized: as long as every
// call but the last has a multiple of eight elements, it is the same however they are divided.
class Squares {
 public:
  void add(const float* x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int64_t k = 0; k < 8; k++) {
        const double value = x[i + k];
        sums_[k] += value * value;
      }
    }
    for (; i < n; i++) rest_ += static_cast<double>(x[i]) * x[i];
  }

  // All of it; begins anew.
  double take() {
    for (double& sum : sums_) {
      rest_ += sum;
      sum = 0;
    }
    const double found = rest_;
    rest_ = 0;
    return found;
  }

 private:
  double sums_[8] = {0};
  double rest_ = 0;
};

// Returns the sum of squares that `Tensors` describes, if it is `squared`; else 0.
template <bool squared>
double run_piece(const Tensors& t, const Scalars& s, Update body, Update tail, int64_t begin,
                 int64_t end) {
  Squares squares;
  double found = 0;
  float cast[kBlock];
  const int64_t first_of_tail = t.size - t.tail;
  const bool clips = t.factor != 1.0f || t.limit < INFINITY;
  const bool moves = t.new_master != nullptr;
  const float sign = t.maximize ? -1.0f : 1.0f;
  float p[kMovedBlock], m[kMovedBlock], v[kMovedBlock], x[kMovedBlock];
  uint16_t halves[kBlock];
  const int64_t block = moves ? kMovedBlock : kBlock;
  for (int64_t at = begin, n; at < end; at += n) {
    const Update call = at < first_of_tail ? body : tail;
    const int64_t stop = at < first_of_tail && end > first_of_tail ? first_of_tail : end;
    n = stop - at < block ? stop - at : block;
    const float* gradient = in_float(t.gradient, t.gradient_dtype, at, n, cast);
    if (t.sum != nullptr) {
      for (int64_t i = 0; i < n; i++) cast[i] = t.sum[at + i] + gradient[i];
      gradient = cast;
    }
    if (squared) {
      squares.add(gradient, n);
      if ((at + n - begin) % kAddedBlock == 0) found += squares.take();
    }
    if (clips) {
      clip(t, gradient, cast, n);
      gradient = cast;
    }
    const int64_t bytes = n * static_cast<int64_t>(sizeof(float));
    const State from{t.master + at, t.exp_avg + at, t.exp_avg_sq + at,
                     t.max_exp_avg_sq == nullptr ? nullptr : t.max_exp_avg_sq + at};
    const State to = moves ? State{p, m, v, x} : from;
    call(from, to, s, n, gradient, sign);
    if (moves) {
      stream(t.new_master + at, p, bytes);
      stream(t.new_exp_avg + at, m, bytes);
      stream(t.new_exp_avg_sq + at, v, bytes);
      if (from.x != nullptr) stream(t.new_max_exp_avg_sq + at, x, bytes);
    }
    if (t.copy == nullptr) continue;
    if (t.copy_dtype == kFloat) {
      stream(static_cast<float*>(t.copy) + at, to.p, bytes);
      continue;
    }
    if (t.copy_dtype == kBfloat16) {
      for (int64_t i = 0; i < n; i++) halves[i] = to_bf16(to.p[i]);
    } else {
      for (int64_t i = 0; i < n; i++) halves[i] = to_half(to.p[i]);
    }
    stream(static_cast<uint16_t*>(t.copy) + at, halves, n * 2);
  }
  end_streams();
  return found + squares.take();
}

struct Work {  // what threads share
  virtual void work() = 0;
  virtual ~Work() = default;
};

struct Sums : Work {  // additions, in pieces that threads take in turn
  const Part* parts;
  bool squared, writes;
  std::vector<int64_t> first;   // of each part: its first piece
  std::vector<double> squares;  // of each piece's new totals, if they are wanted
  int64_t pieces = 0;
  std::atomic<int64_t> next{0};

  Sums(const Part* given, int64_t count, bool wants_squares, bool does_write)
      : parts(given), squared(wants_squares), writes(does_write) {
    for (int64_t i = 0; i < count; i++) {
      first.push_back(pieces);
      pieces += (given[i].size + kPiece - 1) / kPiece;
    }
    first.push_back(pieces);
    if (squared) squares.resize(pieces);
  }

  static void begin(const Part& part, int64_t at, int64_t n, float* cast) {
    const float* from = in_float(part.gradient, part.dtype, at, n, cast);
    stream(part.total + at, from, n * static_cast<int64_t>(sizeof(float)));
  }

  static void add(const Part& part, int64_t begin, int64_t end) {
    float* total = part.total;
    if (part.dtype == kFloat) {
      const float* from = static_cast<const float*>(part.gradient);
      for (int64_t i = begin; i < end; i++) total[i] += from[i];
    } else if (part.dtype == kBfloat16) {
      const uint16_t* from = static_cast<const uint16_t*>(part.gradient);
      for (int64_t i = begin; i < end; i++) total[i] += from_bf16(from[i]);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(part.gradient);
      for (int64_t i = begin; i < end; i++) total[i] += from_half(from[i]);
    }
  }

  // What the total would be; nothing is written.
  static const float* sum(const Part& part, int64_t at, int64_t n, float* cast) {
    const float* from = in_float(part.gradient, part.dtype, at, n, cast);
    if (part.begins) return from;
    for (int64_t i = 0; i < n; i++) cast[i] = part.total[at + i] + from[i];
    return cast;
  }

  void work() override {
    float cast[kAddedBlock];
    size_t k = 0;
    for (int64_t piece = next++; piece < pieces; piece = next++) {
      while (first[k + 1] <= piece) k++;
      const Part& part = parts[k];
      const int64_t from = (piece - first[k]) * kPiece;
      const int64_t end = from + kPiece < part.size ? from + kPiece : part.size;
      double found = 0;
      for (int64_t at = from; at < end; at += kAddedBlock) {  // squares from the L1 cache
        const int64_t stop = at + kAddedBlock < end ? at + kAddedBlock : end;
        Squares block;
        if (!writes) {
          block.add(sum(part, at, stop - at, cast), stop - at);
        } else if (!part.begins) {
          add(part, at, stop);
          if (squared) block.add(part.total + at, stop - at);
        } else {
          begin(part, at, stop - at, cast);
          if (squared)
            block.add(in_float(part.gradient, part.dtype, at, stop - at, cast), stop - at);
        }
        found += block.take();
      }
      if (squared) squares[piece] = found;
    }
    end_streams();
  }
};

struct Call : Work {  // one update, in pieces that threads take in turn
  const Tensors* tensors;
  std::vector<Scalars> scalars;
  std::vector<Update> bodies, tails;
  std::vector<int64_t> first;   // of each tensor: its first piece
  std::vector<double> squares;  // of each piece, if they are wanted
  int64_t pieces = 0;
  std::atomic<int64_t> next{0};

  Call(const Tensors* given, int64_t count, bool squared) : tensors(given) {
    for (int64_t i = 0; i < count; i++) {
      scalars.push_back(scalars_of(given[i]));
      bodies.push_back(choose<false>(given[i], scalars.back()));
      tails.push_back(choose<true>(given[i], scalars.back()));
      first.push_back(pieces);
      pieces += (given[i].size + kPiece - 1) / kPiece;
    }
    first.push_back(pieces);
    if (squared) squares.resize(pieces);
  }

  void work() override {
    size_t at = 0;
    for (int64_t k = next++; k < pieces; k = next++) {
      while (first[at + 1] <= k) at++;
      const Tensors& t = tensors[at];
      const int64_t begin = (k - first[at]) * kPiece;
      const int64_t end = begin + kPiece < t.size ? begin + kPiece : t.size;
      if (squares.empty())
        run_piece<false>(t, scalars[at], bodies[at], tails[at], begin, end);
      else
        squares[k] = run_piece<true>(t, scalars[at], bodies[at], tails[at], begin, end);
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

// Adds all parts; with `squared` each gets the sum of squares of its new totals, the same for any
// number of threads, and also if it is not `written`: then the totals stay as they are. Returns 0, or
// 1 if there was no memory for the call (nothing is changed then).
int lohan_add(void* pool, Part* parts, int64_t count, int32_t squared, int32_t written) {
  try {
    Sums sums(parts, count, squared != 0, written != 0);
    static_cast<Pool*>(pool)->run(sums);
    for (int64_t i = 0; squared && i < count; i++) {
      parts[i].squares = 0;
      for (int64_t k = sums.first[i]; k < sums.first[i + 1]; k++) parts[i].squares += sums.squares[k];
    }
  } catch (...) {
    return 1;
  }
  return 0;
}

// Updates all parameters; with `squared` each gets the sum of squares of its gradient, which is that
// of `lohan_add` to the bit. Returns 0, or 1 if there was no memory for the call (nothing is changed
// then).
int lohan_adam(void* pool, Tensors* tensors, int64_t count, int32_t squared) {
  try {
    Call call(tensors, count, squared != 0);
    static_cast<Pool*>(pool)->run(call);
    for (int64_t i = 0; squared && i < count; i++) {
      tensors[i].squares = 0;
      for (int64_t k = call.first[i]; k < call.first[i + 1]; k++)
        tensors[i].squares += call.squares[k];
    }
  } catch (...) {
    return 1;
  }
  return 0;
}
}
