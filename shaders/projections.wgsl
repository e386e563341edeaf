// Where does a projected key live? The formula of src/predictor/layout.rs. Keys are whole quads, because ranks are
// multiples of 8.

struct ProjectionParams {
    page_shift: u32,
    kv_heads: u32,
    rank: u32,
    key_words: u32,
    norm_base_words: u32,
    record_words: u32,
    slab_shift: u32,
    reserved: u32,
}

// Words from a record's start to the projected key of (head, slot).
fn projected_word(p: ProjectionParams, head: u32, slot: u32) -> u32 {
    return ((head << p.page_shift) + slot) * p.key_words;
}

// Words from a record's start to the residual norm of (head, slot).
fn norm_word(p: ProjectionParams, head: u32, slot: u32) -> u32 {
    return p.norm_base_words + (head << p.page_shift) + slot;
}

// Two bf16 elements as floats.
fn unpack_pair(word: u32) -> vec2<f32> {
    return bitcast<vec2<f32>>(vec2(word << 16u, word & 0xffff0000u));
}
