// How do whole records move? Each thread moves one quad; copy, gather and scatter say from where to where.

struct TransferParams {
    record: RecordParams,
    from_base: u32,
    from_stride: u32,
    to_base: u32,
    to_stride: u32,
    moves_at: u32,
    moves: u32,
    reserved0: u32,
    reserved1: u32,
}

struct Move {
    from_index: u32,
    to_index: u32,
}

@group(0) @binding(0) var<uniform> params: TransferParams;

fn load_move(at: u32) -> Move {
    return Move(descriptors[at], descriptors[at + 1u]);
}

// Workgroups: y and z number the move, x strides over the record's quads.
@compute @workgroup_size(128)
fn transfer(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = group.z * FOLD + group.y;
    if (number >= params.moves) {
        return;
    }
    let move_ = load_move(params.moves_at + 2u * number);
    let quads = params.record.record_words >> 2u;
    for (var quad = group.x * 128u + thread; quad < quads; quad += groups.x * 128u) {
        move_quad(move_, quad);
    }
}
