// How do new tokens get into int8 pages? A workgroup takes whole rows, a power of two of threads each: every thread has eight
// elements, all of a row's threads learn the largest magnitude, and each writes the two words of its codes. The slabs are
// bound as words here, because no thread may touch a word that another one writes.

const THREADS = 64u;

// The bits of the largest magnitude of each thread's elements.
var<workgroup> largest: array<u32, 64>;

// Four elements of a key as they are quantised: centred and scaled by their channels where they are finite.
fn calibrate(bits: vec4<u32>, head: u32, element: u32) -> vec4<u32> {
    let finite = (bits & vec4(INFINITE)) != vec4(INFINITE);
    let x = bitcast<vec4<f32>>(select(vec4(0u), bits, finite));
    let centred = x - channel_four(params.record, head, MEAN, element);
    let scaled = centred * channel_four(params.record, head, INVERSE, element);
    return select(bits, bitcast<vec4<u32>>(scaled), finite);
}

// Eight elements of a row as they are quantised, in bits of f32.
fn prepare(eight: Eight, is_value: bool, head: u32, unit: u32) -> Eight {
    let low = widen(eight.low, params.dtype);
    let high = widen(eight.high, params.dtype);
    if (is_value) {
        return Eight(low, high);
    }
    return Eight(calibrate(low, head, 8u * unit), calibrate(high, head, 8u * unit + 4u));
}

fn largest_of(eight: Eight) -> u32 {
    let four = largest_finite(largest_finite(vec4(0u), eight.low), eight.high);
    return max(max(four.x, four.y), max(four.z, four.w));
}

// Writes eight codes of a row, and its scale beside the first ones.
fn store_codes(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32, eight: Eight, row_largest: u32) {
    let record = params.record;
    let place = frame_place(record, run.frame);
    let slot = run.slot + token;
    var row = key_word(record, head, slot);
    var scale = key_scale_word(record, head, slot);
    if (is_value) {
        row = value_word(record, head, slot);
        scale = value_scale_word(record, head, slot);
    }
    let first = 4u * place.quad;
    let inverse = inverse_of(row_largest);
    store_word(place.slab, first + row + 2u * unit, codes_of(eight.low, inverse));
    store_word(place.slab, first + row + 2u * unit + 1u, codes_of(eight.high, inverse));
    if (unit == 0u) {
        store_word(place.slab, first + scale, bitcast<u32>(scale_of(row_largest)));
    }
}

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
    // Threads of a row: as many as the longer rows have units, rounded up.
    let shift = firstLeadingBit((max(record.k_dim, record.v_dim) >> 2u) - 1u);
    let together = THREADS >> shift;
    let unit = thread & ((1u << shift) - 1u);
    var bad = 0u;
    for (var first = group.x * together; first < 2u * rows; first += groups.x * together) {
        let row = first + (thread >> shift);
        let is_value = row >= rows;
        let token = row % run.tokens;
        let head = (row - select(0u, rows, is_value)) / run.tokens;
        let units = select(record.k_dim, record.v_dim, is_value) >> 3u;
        let takes_part = row < 2u * rows && unit < units;
        var eight = Eight(vec4(0u), vec4(0u));
        if (takes_part) {
            let source = source_eight(run, is_value, token, head, unit);
            bad += count_eight(source);
            eight = prepare(source, is_value, head, unit);
        }
        // The first barrier lets the rows before these read what this overwrites.
        workgroupBarrier();
        largest[thread] = largest_of(eight);
        workgroupBarrier();
        var row_largest = 0u;
        for (var i = 0u; i < units; i++) {
            row_largest = max(row_largest, largest[thread - unit + i]);
        }
        if (takes_part && params.write == 1u) {
            store_codes(run, is_value, token, head, unit, eight, row_largest);
        }
    }
    if (bad > 0u) {
        atomicAdd(&non_finite, bad);
    }
}
