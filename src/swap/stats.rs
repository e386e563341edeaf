//! What did the swap do, and how much of the travelling did computation hide?

use super::HighSpeedSwap;
use crate::Result;
use crate::backend::Backend;
use crate::store::Stats;
use crate::tiers::TierStats;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Duration;

/// What attention met, in one call or summed over all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct AttendStats {
    /// Calls.
    pub calls: u64,
    /// Pages of the sequences attended (a page counts once for each batch of rows that fits the states).
    pub pages: u64,
    /// Pages among them that were in frames already.
    pub hits: u64,
    /// Pages that had to come, or were on their way.
    pub misses: u64,
    /// Device time that pages travelled, where the device tells.
    pub travelled: Duration,
    /// Time among it that attention waited for them: on the device where that tells, on the host otherwise.
    pub waited: Duration,
}

impl AttendStats {
    /// Travelling that computation hid.
    pub fn hidden(&self) -> Duration {
        self.travelled.saturating_sub(self.waited)
    }
}

/// A snapshot of a [`HighSpeedSwap`]'s counters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SwapStats {
    /// The counters of the store inside: frames, pages wherever they are, tokens, rows.
    pub store: Stats,
    /// Frames of the device budget.
    pub frames: u64,
    /// Pages in frames.
    pub resident_pages: u64,
    /// Pages in frames that the tier holds too.
    pub clean_pages: u64,
    /// Pages that may not give up their frames.
    pub pinned_pages: u64,
    /// Pages that came back from the tier.
    pub streamed_pages: u64,
    /// Batches of pages that came back.
    pub tiles: u64,
    /// All attention so far. Times of the device are known when it has finished: after
    /// [`synchronize`](HighSpeedSwap::synchronize) they are complete.
    pub attend: AttendStats,
    /// The last call of attend (its times as far as known).
    pub last_attend: AttendStats,
    /// The tier's counters, one entry a level.
    pub tiers: Vec<TierStats>,
}

/// Four events of a landing: the pages begin and end to travel, attention is ready for them, attention goes on.
type Timing<B> = [<B as Backend>::Event; 4];

/// Collects the counters.
#[derive(Debug)]
pub(super) struct Meter<B: Backend> {
    all: AttendStats,
    last: AttendStats,
    streamed: u64,
    tiles: u64,
    call: u64,
    timings: VecDeque<(u64, Timing<B>)>,
}

impl<B: Backend> Default for Meter<B> {
    fn default() -> Self {
        let (all, last) = (AttendStats::default(), AttendStats::default());
        Meter { all, last, streamed: 0, tiles: 0, call: 0, timings: VecDeque::new() }
    }
}

impl<B: Backend> Meter<B> {
    pub(super) fn begin_attend(&mut self) {
        self.call += 1;
        self.all.calls += 1;
        self.last = AttendStats { calls: 1, ..AttendStats::default() };
    }

    pub(super) fn met(&mut self, pages: u64, misses: u64) {
        for stats in [&mut self.all, &mut self.last] {
            stats.pages += pages;
            stats.misses += misses;
            stats.hits += pages - misses;
        }
    }

    pub(super) fn fetched(&mut self, pages: usize) {
        self.streamed += pages as u64;
        self.tiles += 1;
    }

    pub(super) fn waited(&mut self, time: Duration) {
        self.all.waited += time;
        self.last.waited += time;
    }

    pub(super) fn moved(&mut self, timing: Timing<B>) {
        self.timings.push_back((self.call, timing));
    }

    /// Adds the times of landings that have finished.
    pub(super) fn resolve(&mut self, backend: &B) -> Result<()> {
        while let Some((call, [began, ended, ready, resumed])) = self.timings.front() {
            if !backend.is_done(resumed)? {
                break;
            }
            let (travelled, waited) = (backend.elapsed(began, ended)?, backend.elapsed(ready, resumed)?);
            let (travelled, waited) = (travelled.unwrap_or_default(), waited.unwrap_or_default());
            let current = *call == self.call;
            for stats in [Some(&mut self.all), current.then_some(&mut self.last)].into_iter().flatten() {
                stats.travelled += travelled;
                stats.waited += waited;
            }
            self.timings.pop_front();
        }
        Ok(())
    }
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Counters, as of now.
    pub fn stats(&mut self) -> SwapStats {
        self.reap();
        if let Err(error) = self.meter.resolve(&self.store.pool.backend) {
            tracing::warn!(%error, "times of the device are incomplete");
        }
        let store = self.store.stats();
        let residency = self.resident();
        SwapStats {
            store,
            frames: residency.limit,
            resident_pages: residency.frames.capacity() - residency.frames.free(),
            clean_pages: residency.clean(),
            pinned_pages: residency.pinned(),
            streamed_pages: self.meter.streamed,
            tiles: self.meter.tiles,
            attend: self.meter.all,
            last_attend: self.meter.last,
            tiers: self.tier.stats(),
        }
    }
}
