// How are stored keys projected on a basis? A workgroup takes eight tokens of one run and KV head: it decodes their keys
// once, then each thread sums two columns of the basis for four tokens, which are the lanes of its vec4s.

struct ProjectParams {
    record: RecordParams,
    projections: ProjectionParams,
    basis_base: u32,
    basis_stride: u32,
    runs_at: u32,
    runs: u32,
}

struct ProjectRun {
    frame: u32,
    page: u32,
    slot: u32,
    tokens: u32,
}

@group(0) @binding(0) var<uniform> params: ProjectParams;
@group(1) @binding(0) var<storage, read> basis: array<u32>;
// One slab of records: the host makes a call for each.
@group(1) @binding(1) var<storage, read_write> projected: array<u32>;

const THREADS = 64u;
const TILE = 8u;

// Element d of tokens 0 to 3 of the tile, then of tokens 4 to 7.
var<workgroup> keys: array<vec4<f32>, 512>;

fn load_run(at: u32) -> ProjectRun {
    return ProjectRun(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u]);
}

// Elements 8 × unit .. 8 × unit + 8 of a token of the tile; zeros past its end.
fn stage(run: ProjectRun, place: Place, head: u32, token: u32, unit: u32) -> Eight {
    if (token >= run.tokens) {
        return Eight(vec4(0.0), vec4(0.0));
    }
    return load_key(place, head, run.slot + token, unit);
}

fn store(run: ProjectRun, head: u32, token: u32, pair: u32, low: f32, high: f32) {
    if (token >= run.tokens) {
        return;
    }
    let p = params.projections;
    let record = run.page * p.record_words;
    let bits = f32_to_bf16(vec4(bitcast<u32>(low), bitcast<u32>(high), 0u, 0u));
    projected[record + projected_word(p, head, run.slot + token) + pair] = pack(bits.x, bits.y);
    if (pair == 0u) {
        projected[record + norm_word(p, head, run.slot + token)] = 0u;
    }
}

// Workgroups: y and z number the run, x strides over its KV heads and tiles.
@compute @workgroup_size(64)
fn project(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = group.z * FOLD + group.y;
    if (number >= params.runs) {
        return;
    }
    let run = load_run(params.runs_at + 4u * number);
    let place = frame_place(params.record, run.frame);
    let dim = params.record.k_dim;
    let pairs = params.projections.rank >> 1u;
    let tiles = (run.tokens + TILE - 1u) / TILE;
    for (var work = group.x; work < tiles * params.record.kv_heads; work += groups.x) {
        let head = work / tiles;
        let first = work % tiles * TILE;
        workgroupBarrier();
        // A thread takes eight elements of four tokens.
        for (var i = thread; i < (dim >> 2u); i += THREADS) {
            let unit = i >> 1u;
            let half = i & 1u;
            let token = first + 4u * half;
            let t0 = stage(run, place, head, token, unit);
            let t1 = stage(run, place, head, token + 1u, unit);
            let t2 = stage(run, place, head, token + 2u, unit);
            let t3 = stage(run, place, head, token + 3u, unit);
            let at = 16u * unit + half;
            keys[at] = vec4(t0.a.x, t1.a.x, t2.a.x, t3.a.x);
            keys[at + 2u] = vec4(t0.a.y, t1.a.y, t2.a.y, t3.a.y);
            keys[at + 4u] = vec4(t0.a.z, t1.a.z, t2.a.z, t3.a.z);
            keys[at + 6u] = vec4(t0.a.w, t1.a.w, t2.a.w, t3.a.w);
            keys[at + 8u] = vec4(t0.b.x, t1.b.x, t2.b.x, t3.b.x);
            keys[at + 10u] = vec4(t0.b.y, t1.b.y, t2.b.y, t3.b.y);
            keys[at + 12u] = vec4(t0.b.z, t1.b.z, t2.b.z, t3.b.z);
            keys[at + 14u] = vec4(t0.b.w, t1.b.w, t2.b.w, t3.b.w);
        }
        workgroupBarrier();
        for (var i = thread; i < 2u * pairs; i += THREADS) {
            let pair = i % pairs;
            let half = i / pairs;
            let token = first + 4u * half;
            var low = vec4(0.0);
            var high = vec4(0.0);
            if (token < run.tokens) {
                let column = params.basis_base + head * params.basis_stride + pair;
                for (var d = 0u; d < dim; d++) {
                    let p = unpack_pair(basis[column + d * pairs]);
                    let key = keys[2u * d + half];
                    low = fma(key, vec4(p.x), low);
                    high = fma(key, vec4(p.y), high);
                }
            }
            store(run, head, token, pair, low.x, high.x);
            store(run, head, token + 1u, pair, low.y, high.y);
            store(run, head, token + 2u, pair, low.z, high.z);
            store(run, head, token + 3u, pair, low.w, high.w);
        }
    }
}
