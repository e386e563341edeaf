// How do new tokens get into pages of a native format? Each thread writes eight elements of a row: one or two quads.

// Writes elements 8 × unit .. 8 × unit + 8 of one row, and says how many of them are not finite.
fn append_unit(run: AppendRun, is_value: bool, row: u32, unit: u32) -> u32 {
    let record = params.record;
    let token = row % run.tokens;
    let head = row / run.tokens;
    let eight = source_eight(run, is_value, token, head, unit);
    if (params.write == 1u) {
        let place = frame_place(record, run.frame);
        let a = convert(eight.low, params.dtype, record.format);
        let b = convert(eight.high, params.dtype, record.format);
        var quad = place.quad + key_quad(record, head, run.slot + token);
        if (is_value) {
            quad = place.quad + value_quad(record, head, run.slot + token);
        }
        if (record.format == F32) {
            store_quad(place.slab, quad + 2u * unit, a);
            store_quad(place.slab, quad + 2u * unit + 1u, b);
        } else {
            let words = vec4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
            store_quad(place.slab, quad + unit, words);
        }
    }
    return count_eight(eight);
}

// Workgroups: y and z number the run, x strides over its units, all of K before all of V.
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
    let rows = params.record.kv_heads * run.tokens;
    let k_row_units = params.record.k_dim >> 3u;
    let v_row_units = params.record.v_dim >> 3u;
    let k_units = rows * k_row_units;
    let units = k_units + rows * v_row_units;
    var bad = 0u;
    for (var at = group.x * 64u + thread; at < units; at += groups.x * 64u) {
        let is_value = at >= k_units;
        let row_units = select(k_row_units, v_row_units, is_value);
        let local = at - select(0u, k_units, is_value);
        bad += append_unit(run, is_value, local / row_units, local % row_units);
    }
    if (bad > 0u) {
        atomicAdd(&non_finite, bad);
    }
}
