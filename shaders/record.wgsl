// Where does a byte of a page live? The formula of src/record.rs, in quads: four 32-bit words, one load.
// Every row is a whole number of quads, because dimensions are multiples of 8.

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

// Quads from a record's start to the key of (head, slot).
fn key_quad(record: RecordParams, head: u32, slot: u32) -> u32 {
    return ((head << record.page_shift) + slot) * (record.k_row_words >> 2u);
}

// Quads from a record's start to the value of (head, slot).
fn value_quad(record: RecordParams, head: u32, slot: u32) -> u32 {
    return (record.v_base_words >> 2u) + ((head << record.page_shift) + slot) * (record.v_row_words >> 2u);
}
