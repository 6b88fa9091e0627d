// Linear layers of any format for a team of threads: activations are put into the form the format multiplies with
// (`Inputs`), then every thread computes its share of the columns for all rows.
#pragma once

#include "../native/aligned.h"
#include "code_tiles.h"

namespace kvrelay {

inline int32_t activation_type(const Matrix& m) { return kPairs ? m.type : (int32_t)kFloat32; }

/// Rows of inputs to one linear layer, each padded with zeros to whole tiles.
struct Inputs {
  char* data;
  int64_t k, stride;
  int32_t type;

  template <class T>
  T* row(int64_t index) const { return (T*)data + index * stride; }

  KVR_INLINE void put(int64_t index, int64_t at, V v, int lanes) const {
    if (type == kBfloat16) store_n(row<bf16>(index) + at, v, lanes);
    else store_n(row<float>(index) + at, v, lanes);
  }

  /// Before or after the `put`s of a row.
  void pad(int64_t index) const {
    for (int64_t i = k; i < stride; i++) {
      if (type == kBfloat16) row<bf16>(index)[i] = bf16{0};
      else row<float>(index)[i] = 0.f;
    }
  }
};

/// Memory for the inputs of one layer after the other.
class InputBuffer {
 public:
  /// Room for `rows` rows of at most `max_k` numbers. Forgets what was there.
  void reserve(int64_t rows, int64_t max_k) {
    const size_t bytes = (size_t)(round_up(rows, 32) * round_up(max_k, 64) * 4);
    if (bytes > storage_.size()) storage_ = Aligned<char>(bytes);
  }

  Inputs of(const Matrix& m) {
    return {storage_.data(), m.k, round_up(m.k, depth(m.type)), activation_type(m)};
  }

 private:
  Aligned<char> storage_;
};

template <int kBits>
void multiply_share_of_codes(const Codes& w, Share share, const Inputs& x, int64_t rows, const Output& out) {
#if defined(__AMX_BF16__)
  multiply_codes_in_tiles<kBits>(w, share, x.row<bf16>(0), x.stride, rows, out);
#else
  multiply_codes<kBits>(w, share, x.row<UnpackedDot::X>(0), x.stride, rows, out);
#endif
}

/// This thread's columns of x · Wᵀ.
inline void multiply(
    const Matrix& m, const Inputs& x, int64_t rows, float* y, int64_t stride, bool add, int index,
    int threads) {
  const Share share(round_up(m.n, kGroup) / kGroup, index, threads);
  const Output out{y, stride, m.bias, m.n, add};
  if (m.code_bits == 4) return multiply_share_of_codes<4>(codes(m), share, x, rows, out);
  if (m.code_bits == 8) return multiply_share_of_codes<8>(codes(m), share, x, rows, out);
  const Panels w = panels(m);
  if (m.type == kFloat32) {
    multiply_groups<Float32Dot>(w, share, x.row<float>(0), x.stride, rows, out);
    return;
  }
#if defined(__AMX_BF16__)
  multiply_groups_in_tiles(w, share, x.row<bf16>(0), x.stride, rows, out);
#elif defined(__AVX512BF16__)
  multiply_groups<PairDot>(w, share, x.row<bf16>(0), x.stride, rows, out);
#else
  multiply_groups<WideDot>(w, share, x.row<float>(0), x.stride, rows, out);
#endif
}

}  // namespace kvrelay
