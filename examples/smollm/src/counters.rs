//! What did swapping do? The counters of a run, as a table or as JSON.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use kvtide::swap::SwapStats;
use kvtide::tiers::TierStats;
use serde::Serialize;

/// The counters of a store whose pages may leave the device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Counters {
    /// Pages of all tokens that the store was made for.
    #[serde(rename = "whole_pages")]
    pub(crate) whole: u64,
    #[serde(flatten)]
    pub(crate) stats: SwapStats,
}

impl Display for Counters {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (stats, attend) = (&self.stats, &self.stats.attend);
        let mut line = |name: &str, value: fmt::Arguments<'_>| writeln!(f, "{name:<26}{value}");
        line("frames", format_args!("{} for {} pages", stats.frames, self.whole))?;
        let (resident, clean) = (stats.resident_pages, stats.clean_pages);
        line("pages in frames", format_args!("{resident}, {clean} of them with a copy in the tier"))?;
        line("pages streamed", format_args!("{} in {} tiles", stats.streamed_pages, stats.tiles))?;
        let each = |pages: u64| pages as f64 / attend.calls.max(1) as f64;
        let (hits, misses) = (each(attend.hits), each(attend.misses));
        let share = 100.0 * attend.hits as f64 / attend.pages.max(1) as f64;
        line("an attend, on average", format_args!("{hits:.1} hits, {misses:.1} misses ({share:.0} % hits)"))?;
        let last = &stats.last_attend;
        line("the last attend", format_args!("{} hits, {} misses", last.hits, last.misses))?;
        let waited = milliseconds(attend.waited);
        if attend.travelled.is_zero() {
            line("pages travelled", format_args!("the device does not tell; the host waited {waited}"))?;
        } else {
            let (travelled, hidden) = (milliseconds(attend.travelled), milliseconds(attend.hidden()));
            line("pages travelled", format_args!("{travelled}: waited for {waited}, hidden {hidden}"))?;
        }
        stats.tiers.iter().try_for_each(|tier| level(f, tier))
    }
}

fn level(f: &mut Formatter<'_>, tier: &TierStats) -> fmt::Result {
    let name = tier.tier;
    let mut line = |what: &str, value: fmt::Arguments<'_>| writeln!(f, "{:<26}{value}", format!("{name}: {what}"));
    line("mode", format_args!("{}", tier.mode))?;
    line("pages", format_args!("{} of {}, {} bytes each", tier.used_pages, tier.capacity_pages, tier.page_bytes))?;
    line("in", format_args!("{} pages, {}", tier.pages_in, mebibytes(tier.bytes_in)))?;
    line("out", format_args!("{} pages, {}", tier.pages_out, mebibytes(tier.bytes_out)))?;
    line("reads answered", format_args!("{}", tier.hits))?;
    if tier.busy.is_zero() { Ok(()) } else { line("busy", format_args!("{}", milliseconds(tier.busy))) }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
