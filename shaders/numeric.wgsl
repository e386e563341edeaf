// How do an element's bits become another type's? On integers alone, four at a time, so that every driver gives the
// same bits: round to nearest even, NaN kept and made quiet, subnormals kept. Types are Dtype::code of the host.

const F32 = 0u;
const F16 = 1u;
const BF16 = 2u;

// The word of a buffer that holds element `index`.
fn word_of(index: u32, dtype: u32) -> u32 {
    return select(index >> 1u, index, dtype == F32);
}

// Element `index` out of its word.
fn bits_in(word: u32, index: u32, dtype: u32) -> u32 {
    return select((word >> ((index & 1u) << 4u)) & 0xffffu, word, dtype == F32);
}

fn f16_to_f32(small: vec4<u32>) -> vec4<u32> {
    let sign = (small & vec4(0x8000u)) << vec4(16u);
    let magnitude = small & vec4(0x7fffu);
    let mantissa = small & vec4(0x3ffu);
    var bits = (magnitude << vec4(13u)) + vec4(0x38000000u);
    // A subnormal is shifted up until its leading one drops out.
    let up = countLeadingZeros(mantissa) - vec4(21u);
    let subnormal = ((vec4(113u) - up) << vec4(23u)) | (((mantissa << up) & vec4(0x3ffu)) << vec4(13u));
    bits = select(bits, subnormal, magnitude < vec4(0x400u));
    bits = select(bits, vec4(0u), magnitude == vec4(0u));
    let quiet = select(vec4(0u), vec4(0x400000u), mantissa != vec4(0u));
    bits = select(bits, (magnitude << vec4(13u)) | vec4(0x7f800000u) | quiet, magnitude >= vec4(0x7c00u));
    return sign | bits;
}

fn bf16_to_f32(small: vec4<u32>) -> vec4<u32> {
    let quiet = select(vec4(0u), vec4(0x400000u), (small & vec4(0x7fffu)) > vec4(0x7f80u));
    return (small << vec4(16u)) | quiet;
}

fn f32_to_f16(bits: vec4<u32>) -> vec4<u32> {
    let sign = (bits >> vec4(16u)) & vec4(0x8000u);
    let magnitude = bits & vec4(0x7fffffffu);
    let odd = (magnitude >> vec4(13u)) & vec4(1u);
    var small = (magnitude - vec4(0x38000000u) + vec4(0xfffu) + odd) >> vec4(13u);
    // Below 2^-14 the result is a multiple of 2^-24: the mantissa, its leading one included, shifted down.
    let shift = min(vec4(126u) - min(magnitude >> vec4(23u), vec4(112u)), vec4(25u));
    let mantissa = (magnitude & vec4(0x7fffffu)) | vec4(0x800000u);
    let kept = mantissa >> shift;
    let rest = mantissa & ((vec4(1u) << shift) - vec4(1u));
    let tie = vec4(1u) << (shift - vec4(1u));
    let up = (rest > tie) | ((rest == tie) & ((kept & vec4(1u)) == vec4(1u)));
    small = select(small, kept + select(vec4(0u), vec4(1u), up), magnitude < vec4(0x38800000u));
    small = select(small, vec4(0x7c00u), magnitude >= vec4(0x47800000u));
    let nan = vec4(0x7e00u) | ((magnitude >> vec4(13u)) & vec4(0x3ffu));
    small = select(small, nan, magnitude > vec4(0x7f800000u));
    return sign | small;
}

fn f32_to_bf16(bits: vec4<u32>) -> vec4<u32> {
    let high = bits >> vec4(16u);
    let rounded = (bits + vec4(0x7fffu) + (high & vec4(1u))) >> vec4(16u);
    return select(rounded, high | vec4(0x40u), (bits & vec4(0x7fffffffu)) > vec4(0x7f800000u));
}

// Bits of a type as the bits of f32.
fn widen(bits: vec4<u32>, dtype: u32) -> vec4<u32> {
    if (dtype == F16) {
        return f16_to_f32(bits);
    }
    if (dtype == BF16) {
        return bf16_to_f32(bits);
    }
    return bits;
}

// The bits of f32 as bits of a type.
fn narrow(bits: vec4<u32>, dtype: u32) -> vec4<u32> {
    if (dtype == F16) {
        return f32_to_f16(bits);
    }
    if (dtype == BF16) {
        return f32_to_bf16(bits);
    }
    return bits;
}

fn convert(bits: vec4<u32>, source: u32, target_type: u32) -> vec4<u32> {
    if (source == target_type) {
        return bits;
    }
    return narrow(widen(bits, source), target_type);
}

// How many of four elements are infinite or NaN.
fn count_non_finite(bits: vec4<u32>, dtype: u32) -> u32 {
    var exponent = 0x7f800000u;
    if (dtype == F16) {
        exponent = 0x7c00u;
    }
    if (dtype == BF16) {
        exponent = 0x7f80u;
    }
    let bad = select(vec4(0u), vec4(1u), (bits & vec4(exponent)) == vec4(exponent));
    return bad.x + bad.y + bad.z + bad.w;
}

// Two 16-bit elements a word.
fn pack(low: u32, high: u32) -> u32 {
    return low | (high << 16u);
}
