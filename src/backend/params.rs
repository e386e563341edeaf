//! The structs that host and kernels share, word for word.
//!
//! Uniform blocks (`…Params`) and descriptor rows (`AppendRun`, `Move`, `Tile`, `Row`, `MergeRow`, …). Every field is one
//! 32-bit word. `tests/shaders.rs` compares the WGSL offsets, as naga reads them, with [`layouts`];
//! `kernels/params.cuh` asserts the same sizes and offsets when nvcc compiles it.

use bytemuck::{Pod, Zeroable};

/// Declares a shared struct and lists its words for [`layouts`].
macro_rules! shared {
    ($($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $ty:ty = $words:literal,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
            pub struct $name { $($(#[$doc])* pub $field: $ty,)* }
        )*
        /// Name, size and fields (name, byte offset) of every shared struct.
        pub fn layouts() -> Vec<(&'static str, usize, Vec<(&'static str, usize)>)> {
            vec![$((
                stringify!($name),
                size_of::<$name>(),
                vec![$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
            ),)*]
        }
        $( const _: () = assert!(size_of::<$name>() == 4 * (0 $(+ $words)*)); )*
    };
}

shared! {
    /// The page record and the arena's frame numbering: see [`record`](crate::record) for the formula.
    RecordParams {
        /// log2 of the tokens a page.
        page_shift: u32 = 1,
        /// Key and value heads.
        kv_heads: u32 = 1,
        /// Elements of a key row.
        k_dim: u32 = 1,
        /// Elements of a value row.
        v_dim: u32 = 1,
        /// Words of a key row.
        k_row_words: u32 = 1,
        /// Words of a value row.
        v_row_words: u32 = 1,
        /// Words from the record's start to its first value row.
        v_base_words: u32 = 1,
        /// Words of the record.
        record_words: u32 = 1,
        /// Words from one frame to the next.
        frame_words: u32 = 1,
        /// Index bits of a frame number; the bits above them name the slab.
        slab_shift: u32 = 1,
        /// [`PageFormat::code`](crate::PageFormat::code) of the pages.
        format: u32 = 1,
        /// Words from the record's start to its first key scale.
        scale_base_words: u32 = 1,
    }
    /// A strided tensor view `[row, head, element]`; all in elements.
    ViewParams {
        /// Elements from the start of the binding (WGSL) or of the buffer (CUDA) to the view.
        base: u32 = 1,
        /// Elements from one row (token or query row) to the next.
        row: u32 = 1,
        /// Elements from one head to the next.
        head: u32 = 1,
        /// Elements from one element of a head to the next.
        element: u32 = 1,
    }
    /// Arguments of `append`.
    AppendParams {
        /// The destination.
        record: RecordParams = 12,
        /// K of the new tokens.
        k: ViewParams = 4,
        /// V of the new tokens.
        v: ViewParams = 4,
        /// [`Dtype::code`](crate::Dtype::code) of K's and V's elements.
        dtype: u32 = 1,
        /// Index of the first [`AppendRun`], in words of the descriptor buffer.
        runs_at: u32 = 1,
        /// Number of runs.
        runs: u32 = 1,
        /// 1: write the pages; 0: only count non-finite elements.
        write: u32 = 1,
    }
    /// Consecutive tokens that land in consecutive slots of one frame.
    AppendRun {
        /// Elements from the K view's base to the run's first token.
        k_offset: u32 = 1,
        /// Elements from the V view's base to the run's first token.
        v_offset: u32 = 1,
        /// The frame written.
        frame: u32 = 1,
        /// Slot of the first token.
        slot: u32 = 1,
        /// Tokens of the run; slot + tokens ≤ page size.
        tokens: u32 = 1,
        /// The record of projections that the run's keys go to, where they are projected too.
        page: u32 = 1,
        /// Zero.
        reserved: [u32; 2] = 2,
    }
    /// Arguments of `transfer`.
    TransferParams {
        /// The record that moves.
        record: RecordParams = 12,
        /// Words from the start of the source's binding to record 0 (records only).
        from_base: u32 = 1,
        /// Words from one source record to the next (records only).
        from_stride: u32 = 1,
        /// Words from the start of the destination's binding to record 0 (records only).
        to_base: u32 = 1,
        /// Words from one destination record to the next (records only).
        to_stride: u32 = 1,
        /// Index of the first [`Move`], in words of the descriptor buffer.
        moves_at: u32 = 1,
        /// Number of moves.
        moves: u32 = 1,
        /// Zero.
        reserved: [u32; 2] = 2,
    }
    /// One record that moves: a frame number or a record index on either side.
    Move {
        /// Where it is.
        from: u32 = 1,
        /// Where it goes.
        to: u32 = 1,
    }
    /// Arguments of `attend`.
    AttendParams {
        /// The pages read.
        record: RecordParams = 12,
        /// The queries `[row, q_head, k_dim]`.
        q: ViewParams = 4,
        /// [`Dtype::code`](crate::Dtype::code) of the queries.
        q_dtype: u32 = 1,
        /// Query heads.
        q_heads: u32 = 1,
        /// Query heads a KV head.
        group: u32 = 1,
        /// Tokens of a work item (a split or a section), log2.
        split_shift: u32 = 1,
        /// Softmax scale × log2 e.
        scale_log2: f32 = 1,
        /// Index of the first [`Tile`], in words of the descriptor buffer.
        tiles_at: u32 = 1,
        /// Number of tiles.
        tiles: u32 = 1,
        /// Index of the first [`Row`], in words of the descriptor buffer.
        rows_at: u32 = 1,
        /// Work items: the sum of the tiles' splits.
        items: u32 = 1,
        /// Words of a state: v_dim + 4.
        state_words: u32 = 1,
        /// Query vectors (row × head) that one work item may take.
        query_tile: u32 = 1,
        /// Items that the tiles of this call number from (0 unless the call was cut).
        first_item: u32 = 1,
    }
    /// Query rows of one sequence that are attended together, over a run of splits, or of sections where the call's grain
    /// ([`Grain`](crate::attention::Grain)) says so: one work item each.
    Tile {
        /// First word of the sequence's page table in the tables buffer.
        table: u32 = 1,
        /// First row.
        row: u32 = 1,
        /// Rows.
        rows: u32 = 1,
        /// First split or section (token / its length).
        split: u32 = 1,
        /// Splits or sections.
        splits: u32 = 1,
        /// Number of the tile's first work item.
        item: u32 = 1,
        /// Zero.
        reserved: [u32; 2] = 2,
    }
    /// One query row: what it sees and where its states go.
    Row {
        /// First visible token.
        start: u32 = 1,
        /// One past the last visible token; `start == end` when it sees nothing.
        end: u32 = 1,
        /// Index of the state of the row's first split or section.
        state: u32 = 1,
        /// The row's first split or section.
        split: u32 = 1,
    }
    /// Arguments of `merge`.
    MergeParams {
        /// The output `[row, q_head, v_dim]`.
        out: ViewParams = 4,
        /// The log-sum-exp `[row, q_head]`, f32 (its `element` stride is unused).
        lse: ViewParams = 4,
        /// [`Dtype::code`](crate::Dtype::code) of the output.
        out_dtype: u32 = 1,
        /// Query heads.
        q_heads: u32 = 1,
        /// Elements of an output head.
        v_dim: u32 = 1,
        /// Words of a state: v_dim + 4.
        state_words: u32 = 1,
        /// Index of the first [`MergeRow`], in words of the descriptor buffer.
        rows_at: u32 = 1,
        /// Number of rows.
        rows: u32 = 1,
        /// 1 when the log-sum-exp is wanted.
        with_lse: u32 = 1,
        /// States of a section: 1, or [`SECTION`](crate::attention::SECTION) where each is a split's.
        section: u32 = 1,
    }
    /// The states that fold, in order, into one output row.
    MergeRow {
        /// Index of the first state.
        state: u32 = 1,
        /// Number of states.
        states: u32 = 1,
        /// States of the first one's section that would come before it.
        before: u32 = 1,
    }
    /// Arguments of `fold`.
    FoldParams {
        /// Query heads.
        q_heads: u32 = 1,
        /// Elements of an output head.
        v_dim: u32 = 1,
        /// Words of a state: v_dim + 4.
        state_words: u32 = 1,
        /// Index of the first [`FoldRow`], in words of the descriptor buffer.
        rows_at: u32 = 1,
        /// Number of rows.
        rows: u32 = 1,
        /// Zero.
        reserved: [u32; 3] = 3,
    }
    /// The states that fold, in order, into one state.
    FoldRow {
        /// Index of the first state.
        state: u32 = 1,
        /// Number of states.
        states: u32 = 1,
        /// Index of the state written.
        to: u32 = 1,
        /// Zero.
        reserved: u32 = 1,
    }
    /// The record of a page's projected keys: see [`Projections`](crate::predictor::Projections) for the formula.
    ProjectionParams {
        /// log2 of the tokens a page.
        page_shift: u32 = 1,
        /// Key heads.
        kv_heads: u32 = 1,
        /// Elements of a projected key.
        rank: u32 = 1,
        /// Words of a projected key.
        key_words: u32 = 1,
        /// Words from the record's start to its first residual norm.
        norm_base_words: u32 = 1,
        /// Words from one record to the next.
        record_words: u32 = 1,
        /// Index bits of a record number; the bits above them name the slab.
        slab_shift: u32 = 1,
        /// Zero.
        reserved: u32 = 1,
    }
    /// Arguments of `project`.
    ProjectParams {
        /// The pages read.
        record: RecordParams = 12,
        /// The records written.
        projections: ProjectionParams = 8,
        /// Words from the start of the basis's binding to the first KV head's matrix.
        basis_base: u32 = 1,
        /// Words from one KV head's matrix to the next.
        basis_stride: u32 = 1,
        /// Index of the first [`ProjectRun`], in words of the descriptor buffer.
        runs_at: u32 = 1,
        /// Number of runs.
        runs: u32 = 1,
    }
    /// Arguments of an `append` that projects the keys it writes.
    AppendProjectParams {
        /// The destination.
        record: RecordParams = 12,
        /// K of the new tokens.
        k: ViewParams = 4,
        /// V of the new tokens.
        v: ViewParams = 4,
        /// The records written.
        projections: ProjectionParams = 8,
        /// Words from the start of the basis's binding to the first KV head's matrix.
        basis_base: u32 = 1,
        /// Words from one KV head's matrix to the next.
        basis_stride: u32 = 1,
        /// [`Dtype::code`](crate::Dtype::code) of K's and V's elements.
        dtype: u32 = 1,
        /// Index of the first [`AppendRun`], in words of the descriptor buffer.
        runs_at: u32 = 1,
        /// Number of runs.
        runs: u32 = 1,
        /// Zero.
        reserved: [u32; 3] = 3,
    }
    /// Consecutive slots of one frame whose keys are projected.
    ProjectRun {
        /// The frame read.
        frame: u32 = 1,
        /// The record written.
        page: u32 = 1,
        /// The first slot, in both.
        slot: u32 = 1,
        /// Slots; slot + tokens ≤ page size.
        tokens: u32 = 1,
    }
    /// Arguments of the part of `score` that projects the queries.
    QueryParams {
        /// The queries `[row, q_head, k_dim]`.
        q: ViewParams = 4,
        /// [`Dtype::code`](crate::Dtype::code) of the queries.
        q_dtype: u32 = 1,
        /// Query heads.
        q_heads: u32 = 1,
        /// Query heads a KV head.
        group: u32 = 1,
        /// Elements of a query.
        k_dim: u32 = 1,
        /// Elements of a projected query.
        rank: u32 = 1,
        /// Words from the start of the basis's binding to the first KV head's matrix.
        basis_base: u32 = 1,
        /// Words from one KV head's matrix to the next.
        basis_stride: u32 = 1,
        /// Query rows.
        rows: u32 = 1,
    }
    /// Arguments of `score`.
    ScoreParams {
        /// The records read.
        projections: ProjectionParams = 8,
        /// Query heads.
        q_heads: u32 = 1,
        /// Query heads a KV head.
        group: u32 = 1,
        /// Index of the first [`ScoreEntry`], in words of the descriptor buffer.
        entries_at: u32 = 1,
        /// Number of entries.
        entries: u32 = 1,
    }
    /// One page that is scored for one query row.
    ScoreEntry {
        /// The record of the page's projected keys.
        page: u32 = 1,
        /// The query row.
        row: u32 = 1,
        /// Slots that hold tokens, from slot 0 on.
        tokens: u32 = 1,
        /// Zero.
        reserved: u32 = 1,
    }
}
