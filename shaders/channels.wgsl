// What are the keys of int8 pages centred and scaled by? Means, scales and inverses of scales: f32 words
// [kv_head][part][k_dim], four of them at a time. `channels` is declared by the host, as long as the geometry has it.

const MEAN = 0u;
const SCALE = 1u;
const INVERSE = 2u;

// A part of the channels `element` .. `element` + 4 of a head; `element` is a multiple of 4.
fn channel_four(record: RecordParams, head: u32, part: u32, element: u32) -> vec4<f32> {
    return channels[((head * 3u + part) * record.k_dim + element) >> 2u];
}
