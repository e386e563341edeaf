// What is appended? Runs of tokens, whose elements are read as bits of their type, eight of a key or value row a thread.

struct AppendRun {
    k_offset: u32,
    v_offset: u32,
    frame: u32,
    slot: u32,
    tokens: u32,
    page: u32,
}

@group(1) @binding(0) var<storage, read> k_source: array<u32>;
@group(1) @binding(1) var<storage, read> v_source: array<u32>;
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

fn source_bits(is_value: bool, index: u32) -> u32 {
    let at = word_of(index, params.dtype);
    var word: u32;
    if (is_value) {
        word = v_source[at];
    } else {
        word = k_source[at];
    }
    return bits_in(word, index, params.dtype);
}

// Four elements, `step` apart.
fn source_four(is_value: bool, index: u32, step: u32) -> vec4<u32> {
    return vec4(
        source_bits(is_value, index),
        source_bits(is_value, index + step),
        source_bits(is_value, index + 2u * step),
        source_bits(is_value, index + 3u * step),
    );
}

// Eight consecutive elements of a row, as bits.
struct UnitBits {
    low: vec4<u32>,
    high: vec4<u32>,
}

// Elements 8 × unit .. 8 × unit + 8 of a token and head.
fn source_eight(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32) -> UnitBits {
    var view = params.k;
    var first = run.k_offset;
    if (is_value) {
        view = params.v;
        first = run.v_offset;
    }
    let index = first + element_at(view, token, head, unit * 8u);
    let low = source_four(is_value, index, view.element);
    return UnitBits(low, source_four(is_value, index + 4u * view.element, view.element));
}

// How many of eight elements are infinite or NaN.
fn count_eight(eight: UnitBits) -> u32 {
    return count_non_finite(eight.low, params.dtype) + count_non_finite(eight.high, params.dtype);
}
