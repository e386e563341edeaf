// How do new tokens get into pages of a native format? Each thread writes eight elements of a row: one or two quads.

const THREADS = 64u;

// Converts and writes a unit of the row that starts at a quad of its slab; how many of its elements are not finite.
fn convert_unit(slab: u32, quad: u32, unit: u32, eight: UnitBits) -> u32 {
    let format = params.record.format;
    let bits = UnitBits(convert(eight.low, params.dtype, format), convert(eight.high, params.dtype, format));
    if (params.write == 1u && format == F32) {
        store_quad(slab, quad + 2u * unit, bits.low);
        store_quad(slab, quad + 2u * unit + 1u, bits.high);
    } else if (params.write == 1u) {
        store_quad(slab, quad + unit, pack_eight(bits));
    }
    return count_eight(eight);
}

// Workgroups: y and z number the run, x strides over its rows, a power of two of threads each, for the key and the value.
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
    let has_key = unit < (record.k_dim >> 3u);
    let has_value = unit < (record.v_dim >> 3u);
    let place = frame_place(record, run.frame);
    // What needs no conversion stays as it lies, two elements in a word.
    let copies = params.write == 1u && params.dtype == record.format && params.dtype != F32;
    var bad = 0u;
    for (var row = group.x * together + (thread >> shift); row < rows; row += groups.x * together) {
        let head = row / run.tokens;
        let token = row - head * run.tokens;
        let key_at = place.quad + key_quad(record, head, run.slot + token);
        let value_at = place.quad + value_quad(record, head, run.slot + token);
        if (copies) {
            // Both are on their way together.
            var key = vec4(0u);
            var value = vec4(0u);
            if (has_key) {
                key = source_pairs(run, false, token, head, unit);
            }
            if (has_value) {
                value = source_pairs(run, true, token, head, unit);
            }
            if (has_key) {
                store_quad(place.slab, key_at + unit, key);
            }
            if (has_value) {
                store_quad(place.slab, value_at + unit, value);
            }
            if (any((non_finite_pairs(key, params.dtype) | non_finite_pairs(value, params.dtype)) != vec4(0u))) {
                bad += count_pairs(key, params.dtype) + count_pairs(value, params.dtype);
            }
        } else {
            if (has_key) {
                bad += convert_unit(place.slab, key_at, unit, source_eight(run, false, token, head, unit));
            }
            if (has_value) {
                bad += convert_unit(place.slab, value_at, unit, source_eight(run, true, token, head, unit));
            }
        }
    }
    if (bad > 0u) {
        atomicAdd(&non_finite, bad);
    }
}
