// transfer, frames to records side by side in a buffer, which are aligned to words only.

@group(1) @binding(0) var<storage, read_write> records: array<u32>;

fn move_quad(one: Move, quad: u32) {
    let source = frame_place(params.record, one.from_index);
    let words = load_quad(source.slab, source.quad + quad);
    let at = params.to_base + one.to_index * params.to_stride + 4u * quad;
    records[at] = words.x;
    records[at + 1u] = words.y;
    records[at + 2u] = words.z;
    records[at + 3u] = words.w;
}
