//! How fast is one backend beside another? Rows of the same work, in pairs.

use super::row::Row;
use crate::table::table;
use serde::Serialize;

/// The same work on two backends, after each other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Pair {
    op: String,
    shape: String,
    format: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    flush: &'static str,
    backends: [String; 2],
    us: [f64; 2],
    /// Of the limit that each measured.
    #[serde(skip)]
    shares: [f64; 2],
    /// How fast the second is as a share of the first.
    speed: f64,
}

/// Pairs of the first backend's rows with the second's, where both have one.
pub(super) fn pairs(rows: &[Row], backends: [&str; 2]) -> Vec<Pair> {
    let of = |backend| rows.iter().filter(move |row| row.backend == backend);
    let pair = |first: &Row| {
        let second = of(backends[1]).find(|second| second.work() == first.work())?;
        Some(Pair {
            op: first.op.clone(),
            shape: first.shape.clone(),
            format: first.format.clone(),
            flush: first.flush,
            backends: backends.map(str::to_owned),
            us: [first.us, second.us],
            shares: [first.share, second.share],
            speed: first.us / second.us,
        })
    };
    of(backends[0]).filter_map(pair).collect()
}

/// A line a pair.
pub(super) fn lines(pairs: &[Pair]) -> String {
    let Some(Pair { backends: [a, b], .. }) = pairs.first() else { return String::new() };
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let mut rows = vec![
        ["op", "shape", "format", "after", &format!("{a} µs"), "of limit", &format!("{b} µs"), "of limit"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows[0].push(format!("{b}'s speed, of {a}'s"));
    rows.extend(pairs.iter().map(|pair| {
        let [first, second] = pair.us.map(|us| format!("{us:.1}"));
        let [first_share, second_share] = pair.shares.map(percent);
        let Pair { op, shape, format, flush, speed, .. } = pair;
        let named = [op, shape, format].map(String::clone);
        [&named[..], &[(*flush).to_owned(), first, first_share, second, second_share, percent(*speed)]].concat()
    }));
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::super::row::sample;
    use super::*;

    #[test]
    fn rows_of_the_same_work_meet() {
        let rows = [
            sample("cuda", "attend", "1x8192", "W", 19.0),
            sample("cuda", "attend", "1x8192", "R", 15.0),
            sample("cuda", "merge", "64 rows", "R", 5.0),
            sample("wgpu", "attend", "1x8192", "R", 20.0),
            sample("wgpu", "attend", "1x4096", "R", 10.0),
            sample("wgpu", "attend", "1x8192", "W", 38.0),
        ];
        let found = pairs(&rows, ["cuda", "wgpu"]);
        let numbers: Vec<_> = found.iter().map(|pair| (pair.flush, pair.us, pair.speed)).collect();
        assert_eq!(numbers, [("W", [19.0, 38.0], 0.5), ("R", [15.0, 20.0], 0.75)]);
        assert_eq!(pairs(&rows, ["wgpu", "cuda"])[0].speed, 15.0_f64.recip() * 20.0);
        let text = lines(&found);
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("50.0 %") && text.contains("75.0 %"), "{text}");
        assert_eq!(lines(&[]), "");
    }
}
