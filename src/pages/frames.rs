//! Which frames are free, who holds the others, and which one comes next: O(1) for each frame.

use crate::backend::ops::split_frame;

/// End of the free list, and "not free".
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Frame {
    /// Page tables and reservations that hold the frame; 0 when free.
    owners: u32,
    /// Neighbours in the free list, as dense indices.
    previous: u32,
    next: u32,
}

/// The frames of an arena.
///
/// A frame number has the slab above `shift` index bits. Inside, frames are dense indices in slab order. Free frames
/// form a doubly linked list, so that the one right after a given frame can be taken out of its middle: runs stay
/// contiguous without a search.
#[derive(Debug)]
pub(crate) struct Frames {
    shift: u32,
    /// Dense index of each slab's first frame, and the end.
    bases: Vec<u32>,
    frames: Vec<Frame>,
    first_free: u32,
    last_free: u32,
    free: u32,
}

impl Frames {
    /// No frames yet; numbers with `shift` index bits.
    pub(crate) fn new(shift: u32) -> Self {
        Frames { shift, bases: vec![0], frames: Vec::new(), first_free: NONE, last_free: NONE, free: 0 }
    }

    /// Index bits of a frame number.
    pub(crate) fn shift(&self) -> u32 {
        self.shift
    }

    /// All frames.
    pub(crate) fn capacity(&self) -> u64 {
        self.frames.len() as u64
    }

    /// Frames that nobody holds.
    pub(crate) fn free(&self) -> u64 {
        self.free.into()
    }

    /// Frames held by more than one owner.
    pub(crate) fn shared(&self) -> u64 {
        self.frames.iter().filter(|f| f.owners > 1).count() as u64
    }

    /// Adds a slab of free frames.
    pub(crate) fn add_slab(&mut self, frames: u32) {
        for _ in 0..frames {
            self.frames.push(Frame { owners: 0, previous: NONE, next: NONE });
            self.link_last(self.frames.len() as u32 - 1);
        }
        self.bases.push(self.frames.len() as u32);
    }

    /// Adds free frames to the last slab: for numbers that are no places on a device.
    pub(crate) fn extend(&mut self, frames: u32) {
        if self.bases.len() > 1 {
            self.bases.pop();
        }
        self.add_slab(frames);
    }

    /// How many owners a frame has.
    pub(crate) fn owners(&self, frame: u32) -> u32 {
        self.frames[self.dense(frame)].owners
    }

    /// Takes a free frame, the one right after `after` if that is free; `None` when all are held.
    pub(crate) fn take(&mut self, after: Option<u32>) -> Option<u32> {
        let wanted = after.and_then(|frame| {
            let dense = self.dense(frame) as u32;
            let next = dense + 1;
            let same_slab = !self.bases.contains(&next);
            (same_slab && self.frames[next as usize].owners == 0).then_some(next)
        });
        let dense = wanted.or((self.first_free != NONE).then_some(self.first_free))?;
        self.unlink(dense);
        self.frames[dense as usize].owners = 1;
        Some(self.number(dense))
    }

    /// Takes `count` frames in one run of a slab, where there is such a run (a search: for many frames at once only).
    pub(crate) fn take_run(&mut self, count: u32) -> Option<Vec<u32>> {
        let start = self.find_run(count, |frames, dense| frames.is_free(dense))?;
        let taken = (start..start + count).map(|dense| {
            self.unlink(dense);
            self.frames[dense as usize].owners = 1;
            self.number(dense)
        });
        Some(taken.collect())
    }

    /// The first of `count` consecutive places of a slab that all are usable.
    pub(crate) fn find_run(&self, count: u32, is_usable: impl Fn(&Self, u32) -> bool) -> Option<u32> {
        self.bases.windows(2).find_map(|slab| {
            let mut run = 0;
            (slab[0]..slab[1]).find_map(|at| {
                run = if is_usable(self, at) { run + 1 } else { 0 };
                (run == count).then(|| at + 1 - count)
            })
        })
    }

    /// Whether nobody holds the frame at a place in slab order.
    pub(crate) fn is_free(&self, dense: u32) -> bool {
        self.frames[dense as usize].owners == 0
    }

    /// Adds an owner to a held frame.
    pub(crate) fn retain(&mut self, frame: u32) {
        let dense = self.dense(frame);
        debug_assert!(self.frames[dense].owners > 0, "frame {frame} is free");
        self.frames[dense].owners += 1;
    }

    /// Takes an owner away; the frame is free once the last one has gone.
    pub(crate) fn release(&mut self, frame: u32) {
        let dense = self.dense(frame);
        debug_assert!(self.frames[dense].owners > 0, "frame {frame} is free already");
        self.frames[dense].owners -= 1;
        if self.frames[dense].owners == 0 {
            self.link_last(dense as u32);
        }
    }

    /// The place of a frame in slab order, from 0 on.
    pub(crate) fn dense(&self, frame: u32) -> usize {
        let (slab, index) = split_frame(frame, self.shift);
        (self.bases[slab as usize] + index) as usize
    }

    /// The number of the frame at a place in slab order.
    pub(crate) fn number(&self, dense: u32) -> u32 {
        let slab = self.bases.partition_point(|&base| base <= dense) - 1;
        (slab as u32) << self.shift | (dense - self.bases[slab])
    }

    fn link_last(&mut self, dense: u32) {
        let previous = std::mem::replace(&mut self.last_free, dense);
        self.frames[dense as usize] = Frame { owners: 0, previous, next: NONE };
        match previous {
            NONE => self.first_free = dense,
            previous => self.frames[previous as usize].next = dense,
        }
        self.free += 1;
    }

    fn unlink(&mut self, dense: u32) {
        let Frame { previous, next, .. } = self.frames[dense as usize];
        match previous {
            NONE => self.first_free = next,
            previous => self.frames[previous as usize].next = next,
        }
        match next {
            NONE => self.last_free = previous,
            next => self.frames[next as usize].previous = previous,
        }
        self.free -= 1;
    }

    /// Walks the free list: every free frame is listed once, and free + held = capacity.
    #[cfg(any(test, feature = "conformance"))]
    pub(crate) fn is_consistent(&self) -> bool {
        let mut listed = vec![false; self.frames.len()];
        let (mut at, mut previous) = (self.first_free, NONE);
        while at != NONE {
            let frame = &self.frames[at as usize];
            if frame.owners != 0 || frame.previous != previous || std::mem::replace(&mut listed[at as usize], true) {
                return false;
            }
            (previous, at) = (at, frame.next);
        }
        let free = self.frames.iter().filter(|f| f.owners == 0).count();
        previous == self.last_free && free == listed.iter().filter(|&&l| l).count() && free as u32 == self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_stay_contiguous_inside_a_slab_and_never_cross_into_the_next() {
        let mut frames = Frames::new(4);
        frames.add_slab(3);
        frames.add_slab(5);
        let mut after = None;
        let taken: Vec<u32> = std::iter::from_fn(|| {
            after = Some(frames.take(after)?);
            after
        })
        .collect();
        assert_eq!(taken, [0, 1, 2, 16, 17, 18, 19, 20]);
        frames.release(17);
        frames.release(2);
        assert_eq!((frames.take(Some(16)), frames.take(Some(16)), frames.take(None)), (Some(17), Some(2), None));
        assert!(frames.is_consistent());
    }

    #[test]
    fn a_frame_is_free_when_its_last_owner_goes() {
        let mut frames = Frames::new(4);
        frames.add_slab(2);
        let frame = frames.take(None).unwrap();
        frames.retain(frame);
        frames.release(frame);
        assert_eq!((frames.free(), frames.owners(frame)), (1, 1));
        frames.release(frame);
        assert_eq!((frames.free(), frames.owners(frame)), (2, 0));
        assert!(frames.is_consistent());
    }

    #[test]
    fn a_reservation_finds_the_first_run_that_is_long_enough() {
        let mut frames = Frames::new(4);
        frames.add_slab(6);
        let held: Vec<u32> = (0..6).map(|_| frames.take(None).unwrap()).collect();
        [held[0], held[2], held[3], held[4]].into_iter().for_each(|frame| frames.release(frame));
        assert_eq!(frames.take_run(4), None);
        assert_eq!(frames.take_run(3), Some(vec![2, 3, 4]));
        assert!(frames.is_consistent());
    }
}
