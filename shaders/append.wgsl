// What is appended? Runs of tokens, whose elements are read as bits of their type, eight of a key's and a value's row a thread.

struct AppendRun {
    k_offset: u32,
    v_offset: u32,
    frame: u32,
    slot: u32,
    tokens: u32,
    page: u32,
}

@group(1) @binding(2) var<storage, read_write> non_finite: atomic<u32>;

fn load_run(at: u32) -> AppendRun {
    return AppendRun(
        descriptors[at],
        descriptors[at + 1u],
        descriptors[at + 2u],
        descriptors[at + 3u],
        descriptors[at + 4u],
        descriptors[at + 5u],
    );
}

// Eight consecutive elements of a row, as bits.
struct UnitBits {
    low: vec4<u32>,
    high: vec4<u32>,
}

// The highest bits of those of the sixteen-bit elements that are infinite or NaN, two in a word.
fn non_finite_pairs(words: vec4<u32>, dtype: u32) -> vec4<u32> {
    let exponent = select(0x7f807f80u, 0x7c007c00u, dtype == F16);
    let lowest = select(0x00800080u, 0x04000400u, dtype == F16);
    return ((words & vec4(exponent)) + vec4(lowest)) & vec4(0x80008000u);
}

// How many of eight elements of sixteen bits are infinite or NaN.
fn count_pairs(words: vec4<u32>, dtype: u32) -> u32 {
    let ones = countOneBits(non_finite_pairs(words, dtype));
    return ones.x + ones.y + ones.z + ones.w;
}

// How many of eight elements are infinite or NaN.
fn count_eight(eight: UnitBits) -> u32 {
    return count_non_finite(eight.low, params.dtype) + count_non_finite(eight.high, params.dtype);
}

// Eight elements of sixteen bits, two in a word.
fn pack_eight(eight: UnitBits) -> vec4<u32> {
    let a = eight.low;
    let b = eight.high;
    return vec4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
}

// log2 of the threads that share a row of `dim` elements: as many as it has units, rounded up.
fn row_shift(dim: u32) -> u32 {
    return firstLeadingBit((dim >> 2u) - 1u);
}
