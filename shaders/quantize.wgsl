// What is a row in int8? The rule of src/quantize/mod.rs, with the same bits on every driver: magnitudes are compared and
// special values recognised as integers, and the one division is corrected by integers.

// Bits of the smallest magnitude that makes a row more than zeros.
const SMALLEST = 0x04800000u;
const INFINITE = 0x7f800000u;

// The larger of two magnitudes' bits for each of four, where the second is finite.
fn largest_finite(largest: vec4<u32>, bits: vec4<u32>) -> vec4<u32> {
    let magnitude = bits & vec4(0x7fffffffu);
    return max(largest, select(vec4(0u), magnitude, magnitude < vec4(INFINITE)));
}

// The scale of a row, given the bits of its largest magnitude.
fn scale_of(largest: u32) -> f32 {
    return select(bitcast<f32>(largest) * 0.007874016, 1.0, largest < SMALLEST);
}

// 127 / largest, rounded to nearest; 0 for a row of zeros.
fn inverse_of(largest: u32) -> f32 {
    if (largest < SMALLEST) {
        return 0.0;
    }
    // The quotient is (127 × 2^17 ÷ mantissa) × 2^(133 - exponent); the first factor × 2^shift is `quotient`, of 24 bits.
    let mantissa = (largest & 0x7fffffu) | 0x800000u;
    let shift = select(23u, 24u, mantissa > 0xfe0000u);
    var quotient = u32(16646144.0 / f32(mantissa) * f32(1u << shift));
    // What is left of 127 × 2^(17 + shift), which is 0 modulo 2^32. A driver's division is off by 2.5 units at most, so
    // the rest is small, and there are no ties.
    var rest = bitcast<i32>(0u - quotient * mantissa);
    let whole = i32(mantissa);
    for (var i = 0u; i < 4u; i++) {
        let step = select(0, 1, 2 * rest > whole) - select(0, 1, 2 * rest < -whole);
        quotient = bitcast<u32>(bitcast<i32>(quotient) + step);
        rest -= step * whole;
    }
    // The leading one of the quotient adds one to the exponent.
    return bitcast<f32>(((282u - shift - (largest >> 23u)) << 23u) + quotient);
}

// The codes of four elements, a byte each.
fn codes_of(bits: vec4<u32>, inverse: f32) -> u32 {
    let magnitude = bits & vec4(0x7fffffffu);
    let finite = select(vec4(0u), magnitude, magnitude < vec4(INFINITE));
    let rounded = vec4<i32>(min(round(bitcast<vec4<f32>>(finite) * inverse), vec4(127.0)));
    let code = select(rounded, vec4(127), magnitude == vec4(INFINITE));
    let bytes = bitcast<vec4<u32>>(select(code, -code, bits >= vec4(0x80000000u))) & vec4(0xffu);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}
