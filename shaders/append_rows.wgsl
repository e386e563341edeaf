// How does a row become int8? Every thread of the row has eight elements, all of them learn the largest magnitude, and each
// writes the two words of its codes. The slabs are bound as words here, because no thread may touch a word that another one
// writes.

// The bits of the largest magnitude of each thread's elements.
var<workgroup> largest: array<u32, 64>;

// Four elements of a key as they are quantised: centred and scaled by their channels where they are finite.
fn calibrate(bits: vec4<u32>, head: u32, element: u32) -> vec4<u32> {
    let finite = (bits & vec4(INFINITE)) != vec4(INFINITE);
    let x = bitcast<vec4<f32>>(select(vec4(0u), bits, finite));
    let centred = x - channel_four(params.record, head, MEAN, element);
    let scaled = centred * channel_four(params.record, head, INVERSE, element);
    return select(bits, bitcast<vec4<u32>>(scaled), finite);
}

// Eight elements of a row as they are quantised, in bits of f32.
fn prepare(eight: UnitBits, is_value: bool, head: u32, unit: u32) -> UnitBits {
    let low = widen(eight.low, params.dtype);
    let high = widen(eight.high, params.dtype);
    if (is_value) {
        return UnitBits(low, high);
    }
    return UnitBits(calibrate(low, head, 8u * unit), calibrate(high, head, 8u * unit + 4u));
}

fn largest_of(eight: UnitBits) -> u32 {
    let four = largest_finite(largest_finite(vec4(0u), eight.low), eight.high);
    return max(max(four.x, four.y), max(four.z, four.w));
}

// The bits of the largest magnitude of a row, once all of its threads have left theirs. `shift` is log2 of their number.
fn row_largest(thread: u32, shift: u32) -> u32 {
    let first = thread & ~((1u << shift) - 1u);
    var bits = 0u;
    for (var i = 0u; i < (1u << shift); i++) {
        bits = max(bits, largest[first + i]);
    }
    return bits;
}

// Eight codes of a row.
fn unit_codes(eight: UnitBits, row_bits: u32) -> vec2<u32> {
    let inverse = inverse_of(row_bits);
    return vec2(codes_of(eight.low, inverse), codes_of(eight.high, inverse));
}

// Writes eight codes of a row, and its scale beside the first ones.
fn store_codes(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32, codes: vec2<u32>, row_scale: f32) {
    let record = params.record;
    let place = frame_place(record, run.frame);
    let slot = run.slot + token;
    var row = key_word(record, head, slot);
    var scale = key_scale_word(record, head, slot);
    if (is_value) {
        row = value_word(record, head, slot);
        scale = value_scale_word(record, head, slot);
    }
    let first = 4u * place.quad;
    store_word(place.slab, first + row + 2u * unit, codes.x);
    store_word(place.slab, first + row + 2u * unit + 1u, codes.y);
    if (unit == 0u) {
        store_word(place.slab, first + scale, bitcast<u32>(row_scale));
    }
}
