// Where does a byte of a page live? The formula of src/record.rs, in 32-bit words and in quads of them: one load.
// Dimensions are multiples of 8, so every row of a native format is whole quads, and every row of int8 whole halves of quads.

struct RecordParams {
    page_shift: u32,
    kv_heads: u32,
    k_dim: u32,
    v_dim: u32,
    k_row_words: u32,
    v_row_words: u32,
    v_base_words: u32,
    record_words: u32,
    frame_words: u32,
    slab_shift: u32,
    format: u32,
    scale_base_words: u32,
}

// A quad of the arena.
struct Place {
    slab: u32,
    quad: u32,
}

// The first quad of a frame.
fn frame_place(record: RecordParams, frame: u32) -> Place {
    let index = frame & ((1u << record.slab_shift) - 1u);
    return Place(frame >> record.slab_shift, index * (record.frame_words >> 2u));
}

// The number of the row of (head, slot) among those of the record.
fn row_of(record: RecordParams, head: u32, slot: u32) -> u32 {
    return (head << record.page_shift) + slot;
}

// Words from a record's start to the key of (head, slot).
fn key_word(record: RecordParams, head: u32, slot: u32) -> u32 {
    return row_of(record, head, slot) * record.k_row_words;
}

// Words from a record's start to the value of (head, slot).
fn value_word(record: RecordParams, head: u32, slot: u32) -> u32 {
    return record.v_base_words + row_of(record, head, slot) * record.v_row_words;
}

// Words from a record's start to the scale of the key of (head, slot), in quantised formats.
fn key_scale_word(record: RecordParams, head: u32, slot: u32) -> u32 {
    return record.scale_base_words + row_of(record, head, slot);
}

// Words from a record's start to the scale of the value of (head, slot), in quantised formats.
fn value_scale_word(record: RecordParams, head: u32, slot: u32) -> u32 {
    return key_scale_word(record, head, slot) + (record.kv_heads << record.page_shift);
}

// Quads from a record's start to the key of (head, slot), in native formats.
fn key_quad(record: RecordParams, head: u32, slot: u32) -> u32 {
    return key_word(record, head, slot) >> 2u;
}

// Quads from a record's start to the value of (head, slot), in native formats.
fn value_quad(record: RecordParams, head: u32, slot: u32) -> u32 {
    return value_word(record, head, slot) >> 2u;
}
