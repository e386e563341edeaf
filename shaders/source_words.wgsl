// How are rows of new tokens read that lie anyhow? Element by element.

@group(1) @binding(0) var<storage, read> k_source: array<u32>;
@group(1) @binding(1) var<storage, read> v_source: array<u32>;

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

// Eight elements of sixteen bits, two in a word.
fn source_pairs(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32) -> vec4<u32> {
    return pack_eight(source_eight(run, is_value, token, head, unit));
}
