// Which queries does a workgroup attend? Four lanes of one tile, part of its context (a split, or a section of splits) and KV
// head, and what each of them sees.

struct AttendParams {
    record: RecordParams,
    q: ViewParams,
    q_dtype: u32,
    q_heads: u32,
    group: u32,
    split_shift: u32,
    scale_log2: f32,
    tiles_at: u32,
    tiles: u32,
    rows_at: u32,
    items: u32,
    state_words: u32,
    query_tile: u32,
    first_item: u32,
}

struct Tile {
    table: u32,
    row: u32,
    rows: u32,
    split: u32,
    splits: u32,
    item: u32,
}

struct Row {
    start: u32,
    end: u32,
    state: u32,
    split: u32,
}

@group(0) @binding(0) var<uniform> params: AttendParams;
@group(1) @binding(0) var<storage, read> tables: array<u32>;
@group(1) @binding(1) var<storage, read> queries: array<u32>;
@group(1) @binding(2) var<storage, read_write> states: array<f32>;

const SPLIT_SHIFT = 8u;
const SPLIT = 256u;

fn load_tile(number: u32) -> Tile {
    let at = params.tiles_at + 8u * number;
    return Tile(
        descriptors[at],
        descriptors[at + 1u],
        descriptors[at + 2u],
        descriptors[at + 3u],
        descriptors[at + 4u],
        descriptors[at + 5u],
    );
}

fn load_item(tile: u32) -> u32 {
    return descriptors[params.tiles_at + 8u * tile + 5u];
}

fn load_row(number: u32) -> Row {
    let at = params.rows_at + 4u * number;
    return Row(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u]);
}

// The tile that holds a work item: the last one that starts no later. Each thread looks at one of what is left, and tells the
// others through `stage`, where the number is exact: no call has 2^24 tiles.
fn find_tile(item: u32, thread: u32) -> Tile {
    var low = 0u;
    for (var tiles = params.tiles; tiles > 1u;) {
        let step = (tiles + THREADS - 1u) / THREADS;
        let number = low + step * thread;
        if (step * thread < tiles && number < params.tiles && load_item(number) <= item) {
            let next = number + step;
            if (step * (thread + 1u) >= tiles || next >= params.tiles || load_item(next) > item) {
                stage[0] = vec4(f32(number));
            }
        }
        low = u32(workgroupUniformLoad(&stage[0]).x);
        tiles = step;
    }
    return load_tile(low);
}

// Four query vectors of the work item, one a lane.
struct Lanes {
    // Tokens seen, counted from the part's first one; none where `to` is 0.
    from_token: vec4<u32>,
    to_token: vec4<u32>,
    // Element index of the query.
    query: vec4<u32>,
    // First word of the state.
    state: vec4<u32>,
}

fn load_lanes(tile: Tile, part: u32, kv_head: u32, first_vector: u32) -> Lanes {
    var lanes = Lanes(vec4(0u), vec4(0u), vec4(0u), vec4(0u));
    let first = part << params.split_shift;
    for (var lane = 0u; lane < 4u; lane++) {
        // A lane without a query repeats the tile's last one and writes nothing.
        let member = min(first_vector + lane, tile.rows * params.group - 1u);
        let number = tile.row + member / params.group;
        let head = kv_head * params.group + member % params.group;
        let row = load_row(number);
        let from_token = max(row.start, first) - first;
        let to_token = min(max(row.end, first) - first, 1u << params.split_shift);
        let seen = member == first_vector + lane && from_token < to_token;
        lanes.from_token[lane] = select(0u, from_token, seen);
        lanes.to_token[lane] = select(0u, to_token, seen);
        lanes.query[lane] = element_at(params.q, number, head, 0u);
        lanes.state[lane] = ((row.state + part - row.split) * params.q_heads + head) * params.state_words;
    }
    return lanes;
}

// The same of the split that starts `skipped` tokens into the part, whose first token is now the one counted from.
fn lanes_of_split(lanes: Lanes, skipped: u32) -> Lanes {
    let from_token = max(lanes.from_token, vec4(skipped)) - skipped;
    let to_token = min(max(lanes.to_token, vec4(skipped)) - skipped, vec4(SPLIT));
    let seen = from_token < to_token;
    let none = vec4(0u);
    return Lanes(select(none, from_token, seen), select(none, to_token, seen), lanes.query, lanes.state);
}

fn sees(lanes: Lanes, token: u32) -> vec4<bool> {
    return (vec4(token) >= lanes.from_token) & (vec4(token) < lanes.to_token);
}

// Tokens of a split that any of a work item's queries sees, and those that all do which see any.
struct Span {
    from_token: u32,
    to_token: u32,
    all_from: u32,
    all_to: u32,
}

fn span_of(lanes: Lanes) -> Span {
    let ends = lanes.to_token;
    let unseen = ends == vec4(0u);
    let starts = select(lanes.from_token, vec4(SPLIT), unseen);
    let lasts = select(ends, vec4(SPLIT), unseen);
    return Span(
        min(min(starts.x, starts.y), min(starts.z, starts.w)),
        max(max(ends.x, ends.y), max(ends.z, ends.w)),
        max(max(lanes.from_token.x, lanes.from_token.y), max(lanes.from_token.z, lanes.from_token.w)),
        min(min(lasts.x, lasts.y), min(lasts.z, lasts.w)),
    );
}

// Whether any query sees one of so many tokens.
fn some_seen(span: Span, token: u32, tokens: u32) -> bool {
    return token + tokens > span.from_token && token < span.to_token;
}

// Whether all queries see all of so many tokens.
fn all_see(span: Span, token: u32, tokens: u32) -> bool {
    return token >= span.all_from && token + tokens <= span.all_to;
}

// What the rows of two tokens are scaled by.
struct Scales {
    keys: vec2<f32>,
    values: vec2<f32>,
}

fn query_bits(index: u32) -> u32 {
    return bits_in(queries[word_of(index, params.q_dtype)], index, params.q_dtype);
}

// Element `element` of the four queries.
fn load_query(lanes: Lanes, element: u32) -> vec4<f32> {
    let index = lanes.query + vec4(element * params.q.element);
    let bits = vec4(query_bits(index.x), query_bits(index.y), query_bits(index.z), query_bits(index.w));
    return bitcast<vec4<f32>>(widen(bits, params.q_dtype));
}
