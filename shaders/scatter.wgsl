// transfer, records side by side in a buffer, which are aligned to words only, to frames.

@group(1) @binding(0) var<storage, read> records: array<u32>;

fn move_quad(one: Move, quad: u32) {
    let at = params.from_base + one.from_index * params.from_stride + 4u * quad;
    let words = vec4(records[at], records[at + 1u], records[at + 2u], records[at + 3u]);
    let place = frame_place(params.record, one.to_index);
    store_quad(place.slab, place.quad + quad, words);
}
