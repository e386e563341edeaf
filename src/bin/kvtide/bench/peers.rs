//! How fast are other libraries at the same work? What a script like `benches/peers.py` measured in the same session.
//!
//! The file is one JSON object; what it has in lists is
//! `{ "shape": "1x8192:32/8/128/16", "sdpa_bf16": { "us_W": 22.6, "us_R": 19.1 }, … }`, with `op` where that is not `attend` and
//! `rows` where a sequence has more than one. `limit_…` is the time of a plain read or copy. FP8 stands beside int8.

use super::attend::shape_of;
use super::row::Row;
use anyhow::Context;
use serde_json::{Map, Value, json};
use std::path::Path;

/// What was measured.
#[derive(Debug, Default)]
pub(super) struct Peers(Vec<Peer>);

/// A library's times of some work.
#[derive(Debug, PartialEq)]
struct Peer {
    op: String,
    shape: String,
    format: String,
    name: String,
    /// By flush.
    us: [(&'static str, f64); 2],
}

impl Peers {
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let name = || path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(name)?;
        Ok(Peers::parse(&serde_json::from_str(&text).with_context(name)?))
    }

    fn parse(file: &Value) -> Self {
        let lists = file.as_object().into_iter().flat_map(Map::values).filter_map(Value::as_array);
        Peers(lists.flatten().filter_map(Value::as_object).flat_map(measured).collect())
    }

    /// The times of the same work after the same flush, and the fastest peer of them.
    pub(super) fn stand_beside(&self, row: &mut Row) {
        let same = |peer: &&Peer| peer.op == row.op && peer.shape == row.shape && peer.format == row.format;
        let time = |peer: &Peer| peer.us.iter().find(|(flush, _)| *flush == row.flush).map(|(_, us)| *us);
        let found = self.0.iter().filter(same).filter_map(|peer| Some((peer.name.as_str(), time(peer)?)));
        let found: Vec<(&str, f64)> = found.collect();
        let peers = found.iter().filter(|(name, _)| !name.starts_with("limit"));
        if let Some((name, us)) = peers.min_by(|a, b| a.1.total_cmp(&b.1)) {
            (row.peer, row.peer_us) = (Some((*name).to_owned()), Some(*us));
        }
        if !found.is_empty() {
            row.note("peers", found.iter().map(|(name, us)| ((*name).to_owned(), json!(us))).collect::<Map<_, _>>());
        }
    }
}

/// The times in one item of a list; what could not run has none.
fn measured(item: &Map<String, Value>) -> Vec<Peer> {
    let Some(shape) = item.get("shape").and_then(Value::as_str) else { return Vec::new() };
    let op = item.get("op").and_then(Value::as_str).unwrap_or("attend");
    let rows = item.get("rows").and_then(Value::as_u64).unwrap_or(1) as u32;
    let peer = |(key, times): (&String, &Value)| {
        let us = |field| times.get(field).and_then(Value::as_f64);
        let (_, format) = key.rsplit_once('_')?;
        let (name, format) = match format {
            // Not the same format, so the name keeps it.
            "fp8" => (key.as_str(), "int8"),
            format => (key.strip_suffix(&format!("_{format}"))?, format),
        };
        Some(Peer {
            op: op.to_owned(),
            shape: shape_of(shape, rows),
            format: format.to_owned(),
            name: name.to_owned(),
            us: [("W", us("us_W")?), ("R", us("us_R")?)],
        })
    };
    item.iter().filter_map(peer).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row::sample;
    use super::*;

    fn times(w: f64, r: f64) -> Value {
        json!({ "us_W": w, "gbs_W": 1, "us_R": r, "gbs_R": 1 })
    }

    #[test]
    fn rows_find_the_peers_that_did_the_same_work() {
        let peers = Peers::parse(&json!({
            "device": "a card",
            "decode": [
                {
                    "shape": "1x8192:32/8/128/16", "limit_bf16": times(14.0, 11.0), "sdpa_bf16": times(22.0, 19.0),
                    "fa2_lse_bf16": times(21.0, 20.0), "xqa_bf16": { "error": "not here" }, "fa2_fp8": times(9.0, 8.0),
                },
                { "shape": "1x32768:32/8/128/16", "rows": 2048, "sdpa_bf16": times(2000.0, 1999.0) },
            ],
            "small": { "merge": times(1.0, 1.0) },
            "copies": [{ "op": "append", "shape": "1x8192:32/8/128/16", "limit_bf16": times(22.1, 19.2) }],
        }));
        let beside = |op: &str, shape: &str, format: &str, flush: &'static str| {
            let mut row = sample("cuda", op, shape, flush, 20.0);
            row.format = format.into();
            peers.stand_beside(&mut row);
            (row.peer, row.peer_us, row.detail)
        };
        let some = |name: &str, us: f64| (Some(name.to_owned()), Some(us));
        let (peer, us, detail) = beside("attend", "1x8192:32/8/128/16", "bf16", "W");
        assert_eq!((peer, us), some("fa2_lse", 21.0));
        assert_eq!(detail, json!({ "peers": { "limit": 14.0, "sdpa": 22.0, "fa2_lse": 21.0 } }));
        let (peer, us, _) = beside("attend", "1x8192:32/8/128/16", "bf16", "R");
        assert_eq!((peer, us), some("sdpa", 19.0));
        let (peer, us, _) = beside("attend", "1x8192:32/8/128/16", "int8", "R");
        assert_eq!((peer, us), some("fa2_fp8", 8.0));
        let (peer, us, _) = beside("attend", "1x32768:32/8/128/16, 2048 rows each", "bf16", "R");
        assert_eq!((peer, us), some("sdpa", 1999.0));
        // A copy is no peer, and other work has none.
        let (peer, us, detail) = beside("append", "1x8192:32/8/128/16", "bf16", "R");
        assert_eq!((peer, us, detail), (None, None, json!({ "peers": { "limit": 19.2 } })));
        let none = (None, None, Value::Null);
        assert_eq!(beside("attend", "1x32768:32/8/128/16", "bf16", "R"), none);
        assert_eq!(beside("attend", "1x8192:32/8/128/16", "f16", "R"), none);
        assert_eq!(beside("merge", "1x8192:32/8/128/16", "bf16", "R"), none);
    }
}
