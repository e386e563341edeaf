// How does attend read int8 pages? Codes as numbers, which nothing multiplies in the inner loops: the queries take the
// channels' scales, the scores those of the key rows, and the softmax's weights those of the value rows. What the means add
// to every score of a query is a constant beside its state.

// Codes of four rows, eight each.
struct Rows {
    codes: Four,
}

fn load_rows(place: Place, word: u32, stride: u32, lane: u32) -> Rows {
    return Rows(load_four(place.slab, half_of(place, word) + lane, stride >> 1u));
}

fn eight_a(rows: Rows) -> Eight {
    return eight_codes(rows.codes.a);
}

fn eight_b(rows: Rows) -> Eight {
    return eight_codes(rows.codes.b);
}

fn eight_c(rows: Rows) -> Eight {
    return eight_codes(rows.codes.c);
}

fn eight_d(rows: Rows) -> Eight {
    return eight_codes(rows.codes.d);
}

const VALUES_ARE_FINITE = true;

fn load_finite(place: Place, word: u32, lane: u32) -> Eight {
    return eight_codes(load_half(place.slab, half_of(place, word) + lane));
}

// The products of queries with the means come before anything else is in `stage`.
fn stage_query(lanes: Lanes, kv_head: u32, element: u32) {
    let record = params.record;
    let query = load_query(lanes, element);
    let four = element & ~3u;
    asked[asked_at(element)] = query * channel_four(record, kv_head, SCALE, four)[element & 3u];
    stage[element] = query * channel_four(record, kv_head, MEAN, four)[element & 3u];
}

const KEYS_HAVE_MEANS = true;

// Query · mean × scale × log2 e, in an order that depends on the number of elements alone: first 16 threads sum
// every 16th product, then their results are added.
fn sum_products(thread: u32) {
    if (thread < 16u) {
        var sum = vec4(0.0);
        for (var i = thread; i < k_dim(); i += 16u) {
            sum += stage[i];
        }
        stage[SCRATCH + thread] = sum;
    }
}

fn product() -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < 16u; i++) {
        sum += stage[SCRATCH + i];
    }
    return sum * params.scale_log2;
}

fn scale_at(place: Place, word: u32) -> f32 {
    let half = load_half(place.slab, half_of(place, word & ~1u));
    return bitcast<f32>(select(half.x, half.y, (word & 1u) == 1u));
}

// The scales of the keys and values of tokens `thread` and THREADS + `thread`.
fn load_scales(tile: Tile, kv_head: u32, first: u32, span: Span, thread: u32) -> Scales {
    let record = params.record;
    var scales = Scales(vec2(0.0), vec2(0.0));
    for (var i = 0u; i < 2u; i++) {
        let token = i * THREADS + thread;
        if (token >= span.from_token && token < span.to_token) {
            let place = token_place(tile, first + token);
            let slot = slot_of(first + token);
            scales.keys[i] = scale_at(place, key_scale_word(record, kv_head, slot));
            scales.values[i] = scale_at(place, value_scale_word(record, kv_head, slot));
        }
    }
    return scales;
}

// A token that is not seen has no weight, and perhaps no scale that is a number.
fn weigh_value(p: vec4<f32>, scale: f32) -> vec4<f32> {
    return select(vec4(0.0), p * scale, p > vec4(0.0));
}
