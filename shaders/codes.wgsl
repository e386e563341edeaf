// Which numbers are the codes of int8 pages? Four in a word, the first in its lowest byte.

// Eight consecutive codes of a row, as numbers.
struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

fn four_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>(vec4(word) << vec4(24u, 16u, 8u, 0u)) >> vec4(24u));
}

fn eight_codes(words: vec2<u32>) -> Eight {
    return Eight(four_codes(words.x), four_codes(words.y));
}
