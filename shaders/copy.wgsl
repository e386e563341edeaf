// transfer, frame to frame.

fn move_quad(one: Move, quad: u32) {
    let source = frame_place(params.record, one.from_index);
    let place = frame_place(params.record, one.to_index);
    store_quad(place.slab, place.quad + quad, load_quad(source.slab, source.quad + quad));
}
