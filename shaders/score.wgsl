// How well does the best token of a page match a query row? A workgroup takes one page; each thread multiplies projected
// keys, a key at a time, with the queries of the key's KV head, four at a time, and keeps the best product.

struct ScoreParams {
    projections: ProjectionParams,
    q_heads: u32,
    group: u32,
    entries_at: u32,
    entries: u32,
}

struct ScoreEntry {
    page: u32,
    row: u32,
    tokens: u32,
}

@group(0) @binding(0) var<uniform> params: ScoreParams;
@group(1) @binding(0) var<storage, read> queries: array<vec4<f32>>;
@group(1) @binding(1) var<storage, read_write> out: array<f32>;

const THREADS = 64u;
// The score of nothing: the lowest finite number.
const LOWEST = -3.4028234663852886e38;

var<workgroup> best: array<f32, 64>;

fn load_entry(at: u32) -> ScoreEntry {
    return ScoreEntry(descriptors[at], descriptors[at + 1u], descriptors[at + 2u]);
}

// Eight elements of a key times those of a query.
fn product(query: u32, a: vec4<f32>, b: vec4<f32>) -> f32 {
    return dot(queries[query], a) + dot(queries[query + 1u], b);
}

// The products of one key with queries first .. first + 4 of its KV head, where what is not finite is the lowest. A lane
// past the last query repeats it.
fn products(vector: u32, first: u32, slab: u32, key: u32) -> vec4<f32> {
    let quads = params.projections.rank >> 2u;
    let members = min(vec4(first) + vec4(0u, 1u, 2u, 3u), vec4(params.group - 1u));
    let query = (vec4(vector) + members) * quads;
    var sums = vec4(0.0);
    for (var i = 0u; i < (quads >> 1u); i++) {
        let words = load_quad(slab, key + i);
        let a = vec4(unpack_pair(words.x), unpack_pair(words.y));
        let b = vec4(unpack_pair(words.z), unpack_pair(words.w));
        let at = query + vec4(2u * i);
        sums += vec4(product(at.x, a, b), product(at.y, a, b), product(at.z, a, b), product(at.w, a, b));
    }
    let special = (bitcast<vec4<u32>>(sums) & vec4(0x7f800000u)) == vec4(0x7f800000u);
    return select(sums, vec4(LOWEST), special);
}

@compute @workgroup_size(64)
fn score(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = workgroup.y * FOLD + workgroup.x;
    if (number >= params.entries) {
        return;
    }
    let entry = load_entry(params.entries_at + 4u * number);
    let p = params.projections;
    let slab = entry.page >> p.slab_shift;
    let record = (entry.page & ((1u << p.slab_shift) - 1u)) * (p.record_words >> 2u);
    var top = LOWEST;
    for (var i = thread; i < p.kv_heads * entry.tokens; i += THREADS) {
        let head = i / entry.tokens;
        let key = record + (projected_word(p, head, i % entry.tokens) >> 2u);
        let vector = entry.row * params.q_heads + head * params.group;
        for (var first = 0u; first < params.group; first += 4u) {
            let found = products(vector, first, slab, key);
            top = max(top, max(max(found.x, found.y), max(found.z, found.w)));
        }
    }
    best[thread] = top;
    for (var width = THREADS >> 1u; width > 0u; width >>= 1u) {
        workgroupBarrier();
        if (thread < width) {
            best[thread] = max(best[thread], best[thread + width]);
        }
    }
    if (thread == 0u) {
        out[number] = best[0];
    }
}
