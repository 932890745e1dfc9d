// Fetching from memory what will be computed with.
#pragma once

#include "attention_common.h"

namespace llmd::LLMD_ISA_NS {
namespace {

// Asks for cache memory some way ahead of who computes, in the order in which it is read: a decode waits for memory, its tiles lie apart, and each
// is too short for the CPU to foresee where it will read. A CPU drops what is asked for too fast, so whoever computes asks for a few lines every few
// instructions; and it reads from several places at once better than from one, so a block's tiles take turns.
class Ahead {
  public:
    static constexpr int BLOCKS = 128 / BLOCK;  // of one head, before the next one's turn

    // Of `spans`, or of blocks [block, block + blocks) of one: what its last token sees.
    Ahead(const Attention& op, int head, int heads, const Span* spans, int n) : Ahead(op, head, heads, spans, n, op.first_block(spans->position), 1 << 20) {}
    Ahead(const Attention& op, int head, int heads, const Span* spans, int n, int block, int blocks)
        : op_(op), first_(head), heads_(heads), span_(spans), end_(spans + n), from_(block * TILES), to_((block + blocks) * TILES), bytes_(int(op.kv.head_bytes())),
          slowly_(op.kv.type == KV_I8 ? 3 : 0) {
        begin_turn();
        allow(op.kv.type == KV_I8 ? 1024 : 256);  // as measured: less leaves memory idle, more comes too early
        catch_up();
    }
    // Asks for nothing.
    explicit Ahead(const Attention& op) : op_(op), first_(0), heads_(0), span_(nullptr), end_(nullptr), from_(0), to_(0), bytes_(0), slowly_(0) {}

    // Called once for each head and block with the number of its tiles: so much more may be asked for.
    void begin(int tiles) {
        catch_up();
        allow(tiles * bytes_ / 64);
    }

    // The next n lines of 64 bytes, if they may be asked for.
    LLMD_INLINE void ask(int n) {
        if (left_ <= 0) return;
        for (int i = 0; i < n; i++) __builtin_prefetch(at_ + i * 64, 0, 2);
        left_ -= n;
        if ((at_ += n * 64) >= stop_) next_piece();
    }

    // Where n lines of bf16 are computed with: int8's are fewer, and most of them have been asked for where they became bf16.
    LLMD_INLINE void lines(int n) { ask(n >> slowly_); }

  private:
    static constexpr int PIECE = 1024;  // bytes of a tile, before the next one's turn

    const Attention& op_;
    const int first_, heads_;
    const Span* span_;
    const Span* const end_;
    int from_, to_;       // tiles of this span: the first of the turn, and the end of all
    const int bytes_;     // of a tile and head
    const int slowly_;
    int tile_ = 0, tiles_ = 0, head_ = 0, offset_ = 0, left_ = 0;
    const char *at_ = nullptr, *stop_ = nullptr;

    void allow(int n) {
        if (at_) left_ += n;
    }

    void catch_up() {
        while (left_ > 0) ask(8);
    }

    void begin_turn() {
        tiles_ = least(least(BLOCKS * TILES, to_ - from_), span_->position / TILE + 1 - from_);
        tile_ = head_ = offset_ = 0;
        begin_piece();
    }

    void begin_piece() {
        const int tile = span_->tiles[from_ + tile_];
        at_ = op_.cache + op_.kv.offset(most(tile, 0), op_.layer, first_ + head_) + offset_;
        stop_ = at_ + least(PIECE, bytes_ - offset_);
    }

    void next_piece() {
        if (++tile_ == tiles_) tile_ = 0, offset_ += PIECE;
        if (offset_ >= bytes_) offset_ = 0, head_++;
        if (head_ < heads_) return begin_piece();
        from_ += tiles_;
        if (from_ >= to_ || from_ > span_->position / TILE) {
            if (++span_ == end_) {
                at_ = nullptr;
                left_ = 0;
                return;
            }
            from_ = op_.first_block(span_->position) * TILES;
            to_ = 1 << 24;
        }
        begin_turn();
    }
};

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
