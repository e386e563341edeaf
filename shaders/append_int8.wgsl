// How do new tokens get into int8 pages? A workgroup takes whole rows, a power of two of threads each.

const THREADS = 64u;

// Workgroups: y and z number the run, x strides over its rows, all of K before all of V.
@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = group.z * FOLD + group.y;
    if (number >= params.runs) {
        return;
    }
    let run = load_run(params.runs_at + 8u * number);
    let record = params.record;
    let rows = record.kv_heads * run.tokens;
    let shift = row_shift(max(record.k_dim, record.v_dim));
    let together = THREADS >> shift;
    let unit = thread & ((1u << shift) - 1u);
    var bad = 0u;
    for (var first = group.x * together; first < 2u * rows; first += groups.x * together) {
        let row = first + (thread >> shift);
        let is_value = row >= rows;
        let local = row - select(0u, rows, is_value);
        let head = local / run.tokens;
        let token = local - head * run.tokens;
        let takes_part = row < 2u * rows && unit < (select(record.k_dim, record.v_dim, is_value) >> 3u);
        var eight = UnitBits(vec4(0u), vec4(0u));
        if (takes_part) {
            let source = source_eight(run, is_value, token, head, unit);
            bad += count_eight(source);
            eight = prepare(source, is_value, head, unit);
        }
        // The first barrier lets the rows before these read what this overwrites.
        workgroupBarrier();
        largest[thread] = largest_of(eight);
        workgroupBarrier();
        if (takes_part && params.write == 1u) {
            let bits = row_largest(thread, shift);
            store_codes(run, is_value, token, head, unit, unit_codes(eight, bits), scale_of(bits));
        }
    }
    if (bad > 0u) {
        atomicAdd(&non_finite, bad);
    }
}
