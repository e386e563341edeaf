// How well does the best token of a page match a query row? Half a workgroup takes a page; each thread multiplies projected keys,
// four tokens of a KV head at a time, with the queries of that head, four at a time, and keeps the best product.

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

// Threads of an entry.
const LANES = 32u;
// The score of nothing: the lowest finite number.
const LOWEST = -3.4028234663852886e38;

var<workgroup> best: array<f32, 64>;

fn load_entry(at: u32) -> ScoreEntry {
    return ScoreEntry(descriptors[at], descriptors[at + 1u], descriptors[at + 2u]);
}

// Eight elements of a key.
struct Part {
    low: vec4<f32>,
    high: vec4<f32>,
}

fn load_part(slab: u32, quad: u32) -> Part {
    let words = load_quad(slab, quad);
    return Part(vec4(unpack_pair(words.x), unpack_pair(words.y)), vec4(unpack_pair(words.z), unpack_pair(words.w)));
}

// Eight elements of four keys times those of a query.
fn products(query: u32, a: Part, b: Part, c: Part, d: Part) -> vec4<f32> {
    let low = queries[query];
    let high = queries[query + 1u];
    return vec4(
        dot(low, a.low) + dot(high, a.high),
        dot(low, b.low) + dot(high, b.high),
        dot(low, c.low) + dot(high, c.high),
        dot(low, d.low) + dot(high, d.high),
    );
}

// What is not finite is the lowest.
fn finite(sums: vec4<f32>) -> vec4<f32> {
    let special = (bitcast<vec4<u32>>(sums) & vec4(0x7f800000u)) == vec4(0x7f800000u);
    return select(sums, vec4(LOWEST), special);
}

// The best product of four keys with queries first .. first + 4 of their KV head. A lane past the last query repeats it.
fn best_product(vector: u32, first: u32, slab: u32, keys: vec4<u32>) -> f32 {
    let quads = params.projections.rank >> 2u;
    let members = min(vec4(first) + vec4(0u, 1u, 2u, 3u), vec4(params.group - 1u));
    let query = (vec4(vector) + members) * quads;
    var x = vec4(0.0);
    var y = vec4(0.0);
    var z = vec4(0.0);
    var w = vec4(0.0);
    for (var i = 0u; i < (quads >> 1u); i++) {
        let a = load_part(slab, keys.x + i);
        let b = load_part(slab, keys.y + i);
        let c = load_part(slab, keys.z + i);
        let d = load_part(slab, keys.w + i);
        let at = query + vec4(2u * i);
        x += products(at.x, a, b, c, d);
        y += products(at.y, a, b, c, d);
        z += products(at.z, a, b, c, d);
        w += products(at.w, a, b, c, d);
    }
    let top = max(max(finite(x), finite(y)), max(finite(z), finite(w)));
    return max(max(top.x, top.y), max(top.z, top.w));
}

// Workgroups: x and y number the pairs of entries.
@compute @workgroup_size(64)
fn score(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = 2u * (workgroup.y * FOLD + workgroup.x) + thread / LANES;
    let lane = thread % LANES;
    let entry = load_entry(params.entries_at + 4u * min(number, params.entries - 1u));
    let p = params.projections;
    let slab = entry.page >> p.slab_shift;
    let record = (entry.page & ((1u << p.slab_shift) - 1u)) * (p.record_words >> 2u);
    // A thread's tokens are so far apart; one past the last token repeats it.
    let apart = (entry.tokens + 3u) >> 2u;
    var top = LOWEST;
    for (var i = lane; i < p.kv_heads * apart; i += LANES) {
        let head = i / apart;
        let tokens = min(vec4(i - head * apart) + apart * vec4(0u, 1u, 2u, 3u), vec4(entry.tokens - 1u));
        let keys = vec4(
            projected_word(p, head, tokens.x),
            projected_word(p, head, tokens.y),
            projected_word(p, head, tokens.z),
            projected_word(p, head, tokens.w),
        );
        let vector = entry.row * params.q_heads + head * params.group;
        for (var first = 0u; first < params.group; first += 4u) {
            top = max(top, best_product(vector, first, slab, vec4(record) + (keys >> vec4(2u))));
        }
    }
    best[thread] = top;
    for (var width = LANES >> 1u; width > 0u; width >>= 1u) {
        workgroupBarrier();
        if (lane < width) {
            best[thread] = max(best[thread], best[thread + width]);
        }
    }
    if (lane == 0u && number < params.entries) {
        out[number] = best[thread];
    }
}
