// How are stored keys projected on a basis? A thread takes four tokens of one run and KV head, which are the lanes of its vec4s,
// and eight columns of the basis. A sum takes the elements of a key one after the other, so who shares a workgroup, or a call,
// changes no bit of it.

struct ProjectParams {
    record: RecordParams,
    projections: ProjectionParams,
    basis_base: u32,
    basis_stride: u32,
    runs_at: u32,
    runs: u32,
}

@group(0) @binding(0) var<uniform> params: ProjectParams;
// Eight columns of a row a quad: offsets, strides and ranks are multiples of that.
@group(1) @binding(0) var<storage, read> basis: array<vec4<u32>>;
// One slab of records: the host makes a call for each.
@group(1) @binding(1) var<storage, read_write> projected: array<u32>;

const THREADS = 64u;

fn load_run(at: u32) -> ProjectRun {
    return ProjectRun(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u]);
}

// What eight columns have come to, for four tokens each.
struct Sums {
    c0: vec4<f32>,
    c1: vec4<f32>,
    c2: vec4<f32>,
    c3: vec4<f32>,
    c4: vec4<f32>,
    c5: vec4<f32>,
    c6: vec4<f32>,
    c7: vec4<f32>,
}

// An element of the four keys by its row of the basis.
fn plus_element(sums: Sums, key: vec4<f32>, row: vec4<u32>) -> Sums {
    let a = unpack_pair(row.x);
    let b = unpack_pair(row.y);
    let c = unpack_pair(row.z);
    let d = unpack_pair(row.w);
    return Sums(
        fma(key, vec4(a.x), sums.c0),
        fma(key, vec4(a.y), sums.c1),
        fma(key, vec4(b.x), sums.c2),
        fma(key, vec4(b.y), sums.c3),
        fma(key, vec4(c.x), sums.c4),
        fma(key, vec4(c.y), sums.c5),
        fma(key, vec4(d.x), sums.c6),
        fma(key, vec4(d.y), sums.c7),
    );
}

// Four elements of each of the four keys, one after the other. Rows of the basis are `apart` quads from each other.
fn plus_four(sums: Sums, k0: vec4<f32>, k1: vec4<f32>, k2: vec4<f32>, k3: vec4<f32>, at: u32, apart: u32) -> Sums {
    var sum = plus_element(sums, vec4(k0.x, k1.x, k2.x, k3.x), basis[at]);
    sum = plus_element(sum, vec4(k0.y, k1.y, k2.y, k3.y), basis[at + apart]);
    sum = plus_element(sum, vec4(k0.z, k1.z, k2.z, k3.z), basis[at + 2u * apart]);
    return plus_element(sum, vec4(k0.w, k1.w, k2.w, k3.w), basis[at + 3u * apart]);
}

fn packed(low: f32, high: f32) -> u32 {
    let bits = f32_to_bf16(vec4(bitcast<u32>(low), bitcast<u32>(high), 0u, 0u));
    return pack(bits.x, bits.y);
}

// Stores columns 8 × column .. 8 × column + 8 of one token.
fn store(run: ProjectRun, head: u32, token: u32, column: u32, low: vec4<f32>, high: vec4<f32>) {
    if (token >= run.tokens) {
        return;
    }
    let p = params.projections;
    let record = run.page * p.record_words;
    let at = record + projected_word(p, head, run.slot + token) + 4u * column;
    projected[at] = packed(low.x, low.y);
    projected[at + 1u] = packed(low.z, low.w);
    projected[at + 2u] = packed(high.x, high.y);
    projected[at + 3u] = packed(high.z, high.w);
    if (column == 0u) {
        projected[record + norm_word(p, head, run.slot + token)] = 0u;
    }
}

// Projects four tokens from `first` on; those past the end of the run repeat its last one, and are not stored.
fn project_four(run: ProjectRun, head: u32, first: u32, column: u32) {
    let last = run.tokens - 1u;
    let columns = params.projections.rank >> 3u;
    let start = ((params.basis_base + head * params.basis_stride) >> 2u) + column;
    var s = Sums();
    for (var unit = 0u; unit < (params.record.k_dim >> 3u); unit++) {
        let k0 = load_key(run, head, first, unit);
        let k1 = load_key(run, head, min(first + 1u, last), unit);
        let k2 = load_key(run, head, min(first + 2u, last), unit);
        let k3 = load_key(run, head, min(first + 3u, last), unit);
        let at = start + 8u * unit * columns;
        s = plus_four(s, k0.a, k1.a, k2.a, k3.a, at, columns);
        s = plus_four(s, k0.b, k1.b, k2.b, k3.b, at + 4u * columns, columns);
    }
    store(run, head, first, column, vec4(s.c0.x, s.c1.x, s.c2.x, s.c3.x), vec4(s.c4.x, s.c5.x, s.c6.x, s.c7.x));
    store(run, head, first + 1u, column, vec4(s.c0.y, s.c1.y, s.c2.y, s.c3.y), vec4(s.c4.y, s.c5.y, s.c6.y, s.c7.y));
    store(run, head, first + 2u, column, vec4(s.c0.z, s.c1.z, s.c2.z, s.c3.z), vec4(s.c4.z, s.c5.z, s.c6.z, s.c7.z));
    store(run, head, first + 3u, column, vec4(s.c0.w, s.c1.w, s.c2.w, s.c3.w), vec4(s.c4.w, s.c5.w, s.c6.w, s.c7.w));
}

// Workgroups: y and z number the run, x strides over its parts: columns of the basis, then tokens, then KV heads.
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
    let columns = params.projections.rank >> 3u;
    let fours = (run.tokens + 3u) >> 2u;
    for (var part = group.x * 64u + thread; part < columns * fours * params.record.kv_heads; part += groups.x * 64u) {
        let rest = part / columns;
        project_four(run, rest / fours, 4u * (rest % fours), part % columns);
    }
}
