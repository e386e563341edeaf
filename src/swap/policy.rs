//! Which pages give up their frames first? Policies that rank the resident pages, once a step.

use std::fmt;

/// A page in a frame that may give it up: clean, unpinned and not on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resident {
    /// The page's number.
    pub page: u32,
    /// The sequence that wrote it first.
    pub sequence: u64,
    /// Its layer.
    pub layer: u32,
    /// Its place in the sequence: tokens `index × page_size` and on.
    pub index: u32,
    /// The step in which it was attended last.
    pub used: u64,
    /// The present step. A step ends when a layer is attended that does not come after the layer before it.
    pub step: u64,
    /// What the predictor said last; −∞ when it never did.
    pub score: f32,
    /// It came back from the tier for one attention, and was not resident before.
    pub streamed: bool,
}

/// Ranks resident pages. Called at most once a step, and never for a single miss.
pub trait EvictionPolicy: fmt::Debug + Send {
    /// Sorts the pages so that the one to go first comes first.
    fn rank(&mut self, pages: &mut [Resident]);

    /// Whether a page that came back for one attention takes the place of others (`true`), or gives its frame to the next
    /// page that is streamed (`false`).
    fn keeps_streamed(&self) -> bool {
        false
    }

    /// Whether pages are to be scored for the queries of each attention: a policy that does not look at
    /// [`Resident::score`] saves that work. Where they are, the tiles with the best pages are fetched first.
    fn wants_scores(&self) -> bool {
        false
    }
}

/// The default: keeps a stable subset, the latest pages of what is in use.
///
/// Every decode step reads every page of every layer in the same order. Under such a cyclic sweep the least recently used
/// page is the one that is needed next, so recency ranks it worst; a subset that never changes hits as often as any policy
/// can. Streamed pages go first, then pages of sequences that have not been attended for a step, then the earliest
/// tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct StableSubset;

impl EvictionPolicy for StableSubset {
    fn rank(&mut self, pages: &mut [Resident]) {
        let idle = |page: &Resident| page.step.saturating_sub(page.used) > 1;
        pages.sort_by_key(|page| {
            let last_use = if idle(page) { page.used } else { u64::MAX };
            (!page.streamed, last_use, page.index, page.sequence, page.layer)
        });
    }
}

/// Least recently attended first; for comparison. Hits nothing when every step sweeps more pages than there are frames.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lru;

impl EvictionPolicy for Lru {
    fn rank(&mut self, pages: &mut [Resident]) {
        pages.sort_by_key(|page| (page.used, page.layer, page.sequence, page.index));
    }

    fn keeps_streamed(&self) -> bool {
        true
    }
}

/// Lowest predicted score first: what the last queries of its layer did not look for. For pages without a score, as
/// [`StableSubset`].
#[derive(Debug, Clone, Copy, Default)]
pub struct PredictedScore;

impl EvictionPolicy for PredictedScore {
    fn wants_scores(&self) -> bool {
        true
    }

    fn rank(&mut self, pages: &mut [Resident]) {
        StableSubset.rank(pages);
        // Stable, so equal scores keep that order. Scores of different layers have different scales: ranks within a
        // layer are compared, not scores.
        let mut order: Vec<usize> = (0..pages.len()).collect();
        order.sort_by(|&a, &b| {
            let by_layer = pages[a].layer.cmp(&pages[b].layer);
            by_layer.then(pages[a].score.total_cmp(&pages[b].score))
        });
        let mut rank = vec![0usize; pages.len()];
        let (mut layer, mut first) = (None, 0);
        for (place, at) in order.into_iter().enumerate() {
            if layer != Some(pages[at].layer) {
                (layer, first) = (Some(pages[at].layer), place);
            }
            rank[at] = place - first;
        }
        let mut ranked: Vec<(usize, Resident)> = rank.into_iter().zip(pages.iter().copied()).collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        pages.iter_mut().zip(ranked).for_each(|(slot, (_, page))| *slot = page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(page: u32, layer: u32, index: u32) -> Resident {
        Resident { page, sequence: 0, layer, index, used: 9, step: 10, score: f32::NEG_INFINITY, streamed: false }
    }

    fn ranked(policy: &mut dyn EvictionPolicy, mut pages: Vec<Resident>) -> Vec<u32> {
        policy.rank(&mut pages);
        pages.iter().map(|page| page.page).collect()
    }

    #[test]
    fn the_stable_subset_keeps_late_tokens_of_what_is_in_use() {
        let pages = vec![
            page(0, 0, 5),
            page(1, 1, 2),
            Resident { used: 3, ..page(2, 0, 9) },
            Resident { streamed: true, ..page(3, 0, 8) },
        ];
        assert_eq!(ranked(&mut StableSubset, pages), [3, 2, 1, 0]);
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let pages = vec![page(0, 0, 5), Resident { used: 3, ..page(1, 0, 9) }, page(2, 0, 1)];
        assert_eq!(ranked(&mut Lru, pages), [1, 2, 0]);
    }

    #[test]
    fn scores_rank_within_a_layer() {
        let scored = |number, layer, score| Resident { score, ..page(number, layer, number) };
        // Layer 1's scores are all higher than layer 0's; each layer still gives up its own lowest.
        let pages = vec![scored(0, 0, 1.0), scored(1, 0, 0.5), scored(2, 1, 100.0), scored(3, 1, 90.0)];
        let order = ranked(&mut PredictedScore, pages);
        assert_eq!((order[..2].contains(&1), order[..2].contains(&3)), (true, true), "{order:?}");
    }
}
