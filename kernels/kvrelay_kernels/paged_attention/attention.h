// Attention of a batch as items of work that any thread may take: which rows of which sequence, one KV head, which
// splits of 512 keys. Decoding and prefill differ in the number of query rows only.
//
//   few items (a long context decoded alone): each split is an item, its softmax goes to `parts`, merged in order
//   else: an item walks its splits in the same order itself. The numbers are the same either way.
//
// Bound: decoding reads 2·keys·kv_heads·head_dim·b bytes per sequence (bandwidth); prefill does 4·heads·head_dim FLOPs
// per query and key (arithmetic).
#pragma once

#include "../native/aligned.h"
#include "../native/team.h"
#include "few_rows.h"

namespace kvrelay {

constexpr int64_t kMaxRows = 96;  // query rows of an item: enough to hide the reading of a chunk, few enough for L2

struct AttentionShape {
  int64_t heads, window;
  float scale;
};

struct AttentionItem {
  int32_t sequence, head;
  int32_t first_query, num_queries;  // within the sequence
  int32_t first_split, num_splits;
  int32_t first_part;  // of `parts`, one per split; -1: not split up
};

/// What one thread works with. Sized for a head_dim and a number of rows.
class AttentionScratch {
 public:
  void fit(int64_t rows, int64_t head_dim) {
    if (rows == rows_ && head_dim == head_dim_) return;
    rows_ = rows, head_dim_ = head_dim;
    const int64_t stride = round_up(head_dim, kSpan);
    lines_.assign((size_t)(kChunk * head_dim), 0.f);
    wide_.assign((size_t)(kChunk * (head_dim + stride)), 0.f);
    for (int i = 0; i < kChunk; i++) wide_rows_[i] = wide_values() + i * stride;
    q_.assign((size_t)(rows * head_dim), 0.f);
    visible_.resize((size_t)rows);
    for (auto& numbers : states_) numbers.assign((size_t)(rows * (stride + 2)), 0.f);
#if defined(__AMX_BF16__)
    operands_.fit(rows, head_dim);
#endif
  }

#if defined(__AMX_BF16__)
  TileOperands& operands() { return operands_; }
  TileRows& tile() { return tile_; }
#endif

  float* lines() { return lines_.data(); }
  float* wide_lines() { return wide_.data(); }
  float* wide_values() { return wide_.data() + kChunk * head_dim_; }
  const float* const* wide_rows() { return wide_rows_; }
  int64_t stride() const { return round_up(head_dim_, kSpan); }
  float* q() { return q_.data(); }
  Visible* visible() { return visible_.data(); }
  Softmax split() { return state(states_[0].data(), rows_, stride()); }
  Softmax whole() { return state(states_[1].data(), rows_, stride()); }

  /// Values first: they are what must be aligned.
  static Softmax state(float* at, int64_t rows, int64_t stride) {
    return {at + rows * stride, at + rows * (stride + 1), at, stride};
  }

 private:
  int64_t rows_ = 0, head_dim_ = 0;
  Aligned<float> lines_, wide_, q_, states_[2];
  const float* wide_rows_[kChunk];
  std::vector<Visible> visible_;
#if defined(__AMX_BF16__)
  TileOperands operands_;
  TileRows tile_;
#endif
};

/// Attention of one batch and shape: plan once, then `work` on every thread, a barrier, `finish` on every thread.
class Attention {
 public:
  void plan(const Batch& batch, const Cache& cache, const AttentionShape& shape, int threads) {
    batch_ = batch;
    shape_ = shape;
    group_ = shape.heads / cache.kv_heads;
    rows_ = group_ > kMaxRows ? group_ : kMaxRows;
    head_dim_ = cache.head_dim;
    stride_ = round_up(cache.head_dim, kSpan);
    begins_.assign(1, 0);
    items_.clear();
    for (int64_t i = 0; i < batch.num_sequences; i++) {
      begins_.push_back(begins_.back() + batch.query_lens[i]);
      add_items((int32_t)i, cache.kv_heads);
    }
    split_up(threads);
  }

  int64_t num_items() const { return (int64_t)items_.size(); }
  bool is_split() const { return !merges_.empty(); }

  /// `put(query row, element of the row, vector, lanes)` receives outputs.
  template <class Put>
  void work(int64_t index, const Cache& cache, const Rows& q, AttentionScratch& scratch, Put put) {
    const AttentionItem& item = items_[(size_t)index];
    scratch.fit(rows_, head_dim_);
    const int64_t rows = item.num_queries * group_;
    gather(item, q, cache, scratch);
    if (item.first_part >= 0) {
      attend_split(item, item.first_split, cache, scratch, part(item.first_part));
      return;
    }
    const Softmax whole = scratch.whole(), split = scratch.split();
    for (int64_t row = 0; row < rows; row++) whole.clear(row);
    for (int32_t i = 0; i < item.num_splits; i++) {
      attend_split(item, item.first_split + i, cache, scratch, split);
      for (int64_t row = 0; row < rows; row++) whole.merge(row, split, row);
    }
    put_rows(item, whole, put);
  }

  /// Only if `is_split`: thread `index` of `threads` merges its share.
  template <class Put>
  void finish(int index, int threads, AttentionScratch& scratch, Put put) {
    const Share share((int64_t)merges_.size(), index, threads);
    for (int64_t i = share.begin; i < share.end; i++) {
      const AttentionItem& item = merges_[(size_t)i];
      scratch.fit(rows_, head_dim_);
      const Softmax whole = scratch.whole();
      for (int64_t row = 0; row < item.num_queries * group_; row++) {
        whole.clear(row);
        for (int32_t split = 0; split < item.num_splits; split++) whole.merge(row, part(item.first_part + split), row);
      }
      put_rows(item, whole, put);
    }
  }

 private:
  /// Position of a sequence's query.
  int64_t position(int32_t sequence, int64_t query) const {
    return batch_.kv_lens[sequence] - batch_.query_lens[sequence] + query;
  }

  int64_t first_key(int64_t position) const {
    return shape_.window > 0 && position >= shape_.window ? position - shape_.window + 1 : 0;
  }

  /// Later queries see more keys: the longest items come first.
  void add_items(int32_t sequence, int64_t kv_heads) {
    const int64_t step = group_ < kMaxRows ? kMaxRows / group_ : 1, queries = batch_.query_lens[sequence];
    for (int64_t end = queries; end > 0; end -= step) {
      const int64_t begin = end > step ? end - step : 0;
      const int64_t first = first_key(position(sequence, begin)) / kSplit, last = position(sequence, end - 1);
      const int64_t splits = last < 0 ? 0 : last / kSplit - first + 1;
      for (int64_t head = 0; head < kv_heads; head++)
        items_.push_back({sequence, (int32_t)head, (int32_t)begin, (int32_t)(end - begin), (int32_t)first, (int32_t)splits, -1});
    }
  }

  void split_up(int threads) {
    merges_.clear();
    num_parts_ = 0;
    if (threads == 1 || (int64_t)items_.size() >= 4 * threads) return;
    std::vector<AttentionItem> pieces;
    for (AttentionItem& item : items_) {
      if (item.num_splits <= 1) {
        pieces.push_back(item);
        continue;
      }
      item.first_part = (int32_t)num_parts_;
      num_parts_ += item.num_splits;
      merges_.push_back(item);
      for (int32_t i = 0; i < item.num_splits; i++) {
        AttentionItem piece = item;
        piece.first_split += i, piece.num_splits = 1, piece.first_part += i;
        pieces.push_back(piece);
      }
    }
    items_ = std::move(pieces);
    const size_t needed = (size_t)(num_parts_ * rows_ * (stride_ + 2));
    if (parts_.size() < needed) parts_.resize(needed);
  }

  Softmax part(int64_t index) {
    return AttentionScratch::state(parts_.data() + index * rows_ * (stride_ + 2), rows_, stride_);
  }

  /// Query rows, heads of the group side by side: scaled, or as tiles take them.
  void gather(const AttentionItem& item, const Rows& q, const Cache& cache, AttentionScratch& scratch) const {
#if defined(__AMX_BF16__)
    if (cache.type == kBfloat16) {
      configure_tiles(item.num_queries * group_ < kTileRows ? (int)(item.num_queries * group_) : kTileRows);
      gather_rows(item, q, [&](int64_t row, int64_t i, V v, int lanes) KVR_HOT {
        bf16* rounded = scratch.operands().q(row) + i;
        store_n(rounded, v, lanes);
        store_n(scratch.q() + row * head_dim_ + i, load_n(rounded, lanes), lanes);
      });
      return;
    }
#endif
    gather_rows(item, q, [&](int64_t row, int64_t i, V v, int lanes) KVR_HOT {
      store_n(scratch.q() + row * head_dim_ + i, v * splat(shape_.scale), lanes);
    });
  }

  template <class Put>
  void gather_rows(const AttentionItem& item, const Rows& q, Put put) const {
    for (int64_t row = 0; row < item.num_queries * group_; row++) {
      const int64_t query = begins_[(size_t)item.sequence] + item.first_query + row / group_;
      const int64_t from = query * q.row_stride + (item.head * group_ + row % group_) * head_dim_;
      each(head_dim_, [&](int64_t i, int lanes) KVR_HOT { put(row, i, load_at(q.data, q.type, from + i, lanes), lanes); });
    }
  }

  void attend_split(
      const AttentionItem& item, int64_t split, const Cache& cache, AttentionScratch& scratch, const Softmax& state) const {
    for (int64_t row = 0; row < item.num_queries * group_; row++) state.clear(row);
    if (cache.type == kBfloat16) attend_keys<bf16>(item, split, cache, scratch, state);
    else attend_keys<float>(item, split, cache, scratch, state);
  }

  template <class T>
  void attend_keys(
      const AttentionItem& item, int64_t split, const Cache& cache, AttentionScratch& scratch, const Softmax& state) const {
    const int64_t first = first_key(position(item.sequence, item.first_query));
    const int64_t last = position(item.sequence, item.first_query + item.num_queries - 1);
    const int64_t begin = first > split * kSplit ? first / kChunk * kChunk : split * kSplit;
    const int64_t all = last + 1, end = all < (split + 1) * kSplit ? all : (split + 1) * kSplit;
    const int32_t* table = batch_.tables + item.sequence * batch_.table_width;
    TokenRows<T> rows[2];
    if (begin < end) rows[0].find(cache, table, item.head, begin, all);
    for (int64_t key = begin, i = 0; key < end; key += kChunk, i ^= 1) {
      rows[i ^ 1].find(cache, table, item.head, key + kChunk, all);  // the next split's first chunk is fetched, too
      see_chunk(item, key, scratch.visible());
      attend_rows_of(item, rows[i], rows[i ^ 1], (int)(end - key < kChunk ? end - key : kChunk), scratch, state);
    }
  }

  template <class T>
  void attend_rows_of(
      const AttentionItem& item, const TokenRows<T>& here, const TokenRows<T>& next, int num_keys,
      AttentionScratch& scratch, const Softmax& state) const {
    const int64_t rows = item.num_queries * group_;
    const Queries queries = {scratch.q(), head_dim_, scratch.visible()};
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) {
      if (rows <= 2 * kFewRows) {
        transpose_keys(here, head_dim_, scratch.lines());
        const Chunk<T> chunk = {scratch.lines(), here.values, next.keys, next.values};
        attend_few_rows(queries, rows, chunk, head_dim_, shape_.scale, state, scratch.tile());
        return;
      }
      scratch.operands().pack(here, next);
      attend_in_tiles(scratch.operands(), scratch.visible(), rows, shape_.scale, state, scratch.tile());
      return;
    }
#endif
    transpose_keys(here, head_dim_, scratch.lines());
    if constexpr (sizeof(T) == 2) {
      if (rows > kAttendRows) {
        widen_keys(scratch.lines(), head_dim_, scratch.wide_lines());
        widen_values(here.values, head_dim_, scratch.stride(), scratch.wide_values());
        const Chunk<float> wide = {scratch.wide_lines(), scratch.wide_rows(), scratch.wide_rows(), scratch.wide_rows()};
        attend_chunk(queries, rows, wide, num_keys, head_dim_, state);
        return;
      }
    }
    attend_chunk(queries, rows, Chunk<T>{scratch.lines(), here.values, next.keys, next.values}, num_keys, head_dim_, state);
  }

  void see_chunk(const AttentionItem& item, int64_t key, Visible* to) const {
    for (int64_t row = 0; row < item.num_queries * group_; row++)
      to[row] = visible(position(item.sequence, item.first_query + row / group_), key);
  }

  Visible visible(int64_t position, int64_t key) const {
    const int64_t begin = first_key(position) - key, end = position + 1 - key;
    const auto clamp = [](int64_t at) { return (int)(at < 0 ? 0 : at > kChunk ? kChunk : at); };
    return {clamp(begin), clamp(end)};
  }

  template <class Put>
  void put_rows(const AttentionItem& item, const Softmax& state, Put put) const {
    for (int64_t row = 0; row < item.num_queries * group_; row++) {
      const int64_t query = begins_[(size_t)item.sequence] + item.first_query + row / group_;
      const int64_t at = (item.head * group_ + row % group_) * head_dim_;
      const bool blind = state.totals[row] == 0.f;
      each(head_dim_, [&](int64_t i, int lanes) KVR_HOT {
        const V v = load(state.values + row * stride_ + i);
        put(query, at + i, blind ? V{} : v / splat(state.totals[row]), lanes);
      });
    }
  }

  Batch batch_ = {};
  AttentionShape shape_ = {};
  int64_t group_ = 1, rows_ = 0, head_dim_ = 0, stride_ = 0, num_parts_ = 0;
  std::vector<int64_t> begins_;
  std::vector<AttentionItem> items_, merges_;
  Aligned<float> parts_;
};

}  // namespace kvrelay
