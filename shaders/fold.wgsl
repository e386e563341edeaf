// How do states fold into one state? In order, whatever they cover. A workgroup takes one row and head, each thread four
// elements.

struct FoldParams {
    q_heads: u32,
    v_dim: u32,
    state_words: u32,
    rows_at: u32,
    rows: u32,
    reserved0: u32,
    reserved1: u32,
    reserved2: u32,
}

struct FoldRow {
    state: u32,
    states: u32,
    to_index: u32,
    reserved: u32,
}

@group(0) @binding(0) var<uniform> params: FoldParams;
@group(1) @binding(0) var<storage, read_write> states: array<vec4<f32>>;

fn load_fold_row(at: u32) -> FoldRow {
    return FoldRow(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u]);
}

@compute @workgroup_size(64)
fn fold(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = group.y * FOLD + group.x;
    let head = number % params.q_heads;
    let row = number / params.q_heads;
    if (row >= params.rows) {
        return;
    }
    let sources = load_fold_row(params.rows_at + 4u * row);
    let element = thread << 2u;
    var total = nothing();
    if (element < params.v_dim) {
        for (var i = 0u; i < sources.states; i++) {
            total = plus(total, load_state(sources.state + i, head, element));
        }
    }
    // The target may be the first source, whose maximum, sum and constant every thread has read by now.
    storageBarrier();
    if (element < params.v_dim) {
        let at = state_quad(sources.to_index, head);
        states[at + thread] = total.o;
        if (thread == 0u) {
            states[at + (params.v_dim >> 2u)] = vec4(total.m, total.l, total.c, 0.0);
        }
    }
}
