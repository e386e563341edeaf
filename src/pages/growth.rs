//! How the pool grows: by how much, and in slabs of which size.

/// Frames that a pool of `current` should have so that `required` fit: at least twice as many, in whole steps, at most
/// `max`; `None` when `required` does not fit below `max`.
pub(crate) fn target(current: u64, required: u64, step: u64, max: u64) -> Option<u64> {
    match required {
        r if r > max => None,
        r if r <= current => Some(current),
        r => Some(r.max(2 * current).next_multiple_of(step).min(max)),
    }
}

/// What bounds the slabs of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlabLimits {
    /// Frames of the largest slab.
    pub(crate) frames: u64,
    /// Slabs of the arena.
    pub(crate) slabs: u64,
}

impl SlabLimits {
    /// The most frames that can be addressed.
    pub(crate) fn addressable(&self) -> u64 {
        self.frames.saturating_mul(self.slabs)
    }

    /// Frames of the slabs to add to `slabs` slabs with `current` frames, so that there are at least `target`.
    ///
    /// Growth never moves a page, so slabs stay as small as they were made. A slab is therefore made larger than
    /// asked for when otherwise the slabs left could no longer reach `max`.
    pub(crate) fn add(&self, slabs: u64, current: u64, target: u64, max: u64) -> Vec<u32> {
        let mut added = Vec::new();
        let mut frames = current;
        while frames < target {
            let after = (self.slabs - slabs).saturating_sub(added.len() as u64 + 1);
            let must = (max - frames).saturating_sub(after.saturating_mul(self.frames));
            let slab = must.max(target - frames).min(self.frames);
            frames += slab;
            added.push(u32::try_from(slab).expect("a slab's frames fit a frame number"));
        }
        added
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_by_doubling_in_steps_up_to_the_limit() {
        let target = |current, required| target(current, required, 32, 6177);
        assert_eq!(target(0, 6177), Some(6177));
        assert_eq!(target(32, 33), Some(64));
        assert_eq!(target(64, 65), Some(128));
        assert_eq!(target(4096, 4097), Some(6177));
        assert_eq!(target(0, 6178), None);
        assert_eq!(target(64, 10), Some(64));
        assert_eq!(target(0, 1), Some(32));
    }

    #[test]
    fn slabs_never_exceed_their_number_and_always_reach_the_limit() {
        for (frames, slabs, max) in [(100, 4, 400), (100, 4, 399), (8192, 4, 16_384), (7, 64, 300), (50, 1, 50)] {
            let limits = SlabLimits { frames, slabs };
            let (mut have, mut made) = (0, 0);
            while have < max {
                let goal = target(have, have + 1, 8, max).unwrap();
                let added = limits.add(made, have, goal, max);
                made += added.len() as u64;
                have += added.iter().map(|&f| u64::from(f)).sum::<u64>();
                assert!(added.iter().all(|&f| u64::from(f) <= frames) && have >= goal && have <= max);
            }
            assert!(made <= slabs, "{made} slabs");
        }
    }
}
