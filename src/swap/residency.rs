//! Where is each page: in a frame, in a slot of the tier, or in both? Which one gives up its frame next?
//!
//! Bookkeeping on the host alone. A page is *dirty* while no slot holds a copy of it, *busy* while it travels. Only clean
//! pages that nobody has pinned give up their frames.

mod evict;

use super::headroom::Dirty;
use crate::pages::frames::Frames;
use std::collections::VecDeque;

/// "No frame", "no slot".
const NONE: u32 = u32::MAX;

/// Whether a page is on its way between the device and the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Travel {
    No,
    Out,
    In,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    frame: u32,
    slot: u32,
    /// The generation that the slot was written with.
    generation: u64,
    travel: Travel,
    /// Every slot of the page is written.
    full: bool,
    /// It came back for one attention and goes first.
    streamed: bool,
    /// It is in the list of those.
    listed: bool,
    pins: u32,
    /// The step in which it was attended last.
    used: u64,
    score: f32,
    /// Slots whose keys are projected, from slot 0 on.
    projected: u32,
    origin: Origin,
}

/// Whose page it is, or was first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The sequence that wrote it first.
    pub(crate) sequence: u64,
    /// Its layer.
    pub(crate) layer: u32,
    /// Its place in the sequence.
    pub(crate) index: u32,
}

const NOWHERE: Page = Page {
    frame: NONE,
    slot: NONE,
    generation: 0,
    travel: Travel::No,
    full: false,
    streamed: false,
    listed: false,
    pins: 0,
    used: 0,
    score: f32::NEG_INFINITY,
    projected: 0,
    origin: Origin { sequence: 0, layer: 0, index: 0 },
};

/// Frames, pages and what connects them.
#[derive(Debug)]
pub(crate) struct Residency {
    /// The frames of the device budget.
    pub(crate) frames: Frames,
    /// The most frames there may be.
    pub(crate) limit: u64,
    pages: Vec<Page>,
    /// By frame: the last mark on the compute stream that its users came before.
    marks: Vec<u64>,
    /// By frame: its page.
    holders: Vec<u32>,
    /// Pages that were streamed in and attended, oldest first.
    streamed: VecDeque<u32>,
    /// Victims, next one last; made once a step.
    ranking: Vec<u32>,
    /// The step that the ranking was made in, and whether pages have become clean or unpinned since.
    ranked: Option<u64>,
    changed: bool,
    pinned: u64,
    clean: u64,
    /// Slots whose pages are gone.
    freed: Vec<u32>,
}

impl Residency {
    /// No pages yet, over these frames.
    pub(crate) fn new(frames: Frames, limit: u64) -> Self {
        Residency {
            frames,
            limit,
            pages: Vec::new(),
            marks: Vec::new(),
            holders: Vec::new(),
            streamed: VecDeque::new(),
            ranking: Vec::new(),
            ranked: None,
            changed: false,
            pinned: 0,
            clean: 0,
            freed: Vec::new(),
        }
    }

    fn page(&self, page: u32) -> &Page {
        self.pages.get(page as usize).unwrap_or(&NOWHERE)
    }

    fn page_mut(&mut self, page: u32) -> &mut Page {
        let at = page as usize;
        if at >= self.pages.len() {
            self.pages.resize(at + 1, NOWHERE);
        }
        &mut self.pages[at]
    }

    /// The frame of a page that has one.
    pub(crate) fn frame(&self, page: u32) -> u32 {
        let frame = self.page(page).frame;
        debug_assert_ne!(frame, NONE, "page {page} has no frame");
        frame
    }

    /// Whether its tokens are in a frame.
    pub(crate) fn is_resident(&self, page: u32) -> bool {
        let page = self.page(page);
        page.frame != NONE && page.travel != Travel::In
    }

    /// Whether it is on its way to a frame.
    pub(crate) fn is_arriving(&self, page: u32) -> bool {
        self.page(page).travel == Travel::In
    }

    /// Whether the tier holds what the page holds.
    pub(crate) fn is_clean(&self, page: u32) -> bool {
        self.page(page).slot != NONE
    }

    /// Whether it should be written out: full, on the device alone, and not on its way.
    pub(crate) fn wants_out(&self, page: u32) -> bool {
        let page = self.page(page);
        page.full && page.slot == NONE && page.frame != NONE && page.travel == Travel::No
    }

    /// Whether a dirty page that stays where it is is full; `None` for pages that are clean, elsewhere or on their way out.
    pub(crate) fn dirty_page(&self, page: u32) -> Option<bool> {
        let page = self.page(page);
        (page.frame != NONE && page.slot == NONE && page.travel == Travel::No).then_some(page.full)
    }

    /// Counts those pages.
    pub(crate) fn dirty(&self) -> Dirty {
        let pages = self.holders.iter().filter(|&&page| page != NONE).filter_map(|&page| self.dirty_page(page));
        pages.fold(Dirty::default(), |Dirty { partial, full }, is_full| Dirty {
            partial: partial + u64::from(!is_full),
            full: full + u64::from(is_full),
        })
    }

    /// Slot and generation of the tier's copy.
    pub(crate) fn slot(&self, page: u32) -> Option<(u32, u64)> {
        let page = self.page(page);
        (page.slot != NONE).then_some((page.slot, page.generation))
    }

    /// Whose page it was first.
    pub(crate) fn origin(&self, page: u32) -> Origin {
        self.page(page).origin
    }

    /// Pages that are pinned.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned
    }

    /// Pages in frames that the tier holds too.
    pub(crate) fn clean(&self) -> u64 {
        self.clean
    }

    /// A new page takes a frame, the one right after `after`'s if that is free. There must be a free one.
    pub(crate) fn enter(&mut self, page: u32, after: Option<u32>) {
        *self.page_mut(page) = NOWHERE;
        self.settle(page, after);
    }

    fn settle(&mut self, page: u32, after: Option<u32>) -> u32 {
        let after = after.map(|page| self.page(page).frame).filter(|frame| *frame != NONE);
        let frame = self.frames.take(after).expect("a frame was made free before");
        self.hold(page, frame);
        frame
    }

    /// Notes that a frame which was taken for a page holds it.
    fn hold(&mut self, page: u32, frame: u32) {
        let dense = self.frames.dense(frame);
        if dense >= self.holders.len() {
            self.holders.resize(dense + 1, NONE);
            self.marks.resize(dense + 1, 0);
        }
        self.holders[dense] = page;
        self.page_mut(page).frame = frame;
    }

    /// Frees the page's frame, if it has one.
    fn vacate(&mut self, page: u32) {
        let frame = std::mem::replace(&mut self.page_mut(page).frame, NONE);
        if frame != NONE {
            self.clean -= u64::from(self.page(page).slot != NONE && self.page(page).travel != Travel::In);
            let dense = self.frames.dense(frame);
            self.holders[dense] = NONE;
            self.frames.release(frame);
        }
    }

    /// The page's last owner is gone.
    pub(crate) fn forget(&mut self, page: u32) {
        self.vacate(page);
        let old = std::mem::replace(self.page_mut(page), NOWHERE);
        self.pinned -= u64::from(old.pins > 0);
        if old.slot != NONE {
            self.freed.push(old.slot);
        }
    }

    /// Slots that nobody needs any more.
    pub(crate) fn freed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.freed)
    }

    /// A page that is only in the tier, as a reopened store finds it.
    pub(crate) fn restore(&mut self, page: u32, origin: Origin, slot: u32, generation: u64) {
        *self.page_mut(page) = Page { slot, generation, origin, full: true, ..NOWHERE };
    }

    /// The page was written on the device: the tier's copy, if any, is worth nothing now.
    pub(crate) fn written(&mut self, page: u32, full: bool, origin: Origin) {
        let entry = self.page_mut(page);
        (entry.full, entry.streamed, entry.origin) = (full, false, origin);
        let slot = std::mem::replace(&mut entry.slot, NONE);
        if slot != NONE {
            self.clean -= 1;
            self.freed.push(slot);
        }
    }

    /// Keeps a page in its frame until [`unpin`](Self::unpin).
    pub(crate) fn pin(&mut self, page: u32) {
        let entry = self.page_mut(page);
        entry.pins += 1;
        let first = entry.pins == 1;
        self.pinned += u64::from(first);
    }

    /// Takes one pin away, if there is one.
    pub(crate) fn unpin(&mut self, page: u32) {
        let entry = self.page_mut(page);
        if entry.pins > 0 {
            entry.pins -= 1;
            let last = entry.pins == 0;
            self.pinned -= u64::from(last);
            self.changed |= last;
        }
    }

    /// Work that uses the page's frame comes before `mark` on the compute stream.
    pub(crate) fn used(&mut self, page: u32, mark: u64, step: u64) {
        let frame = self.frame(page);
        let dense = self.frames.dense(frame);
        self.marks[dense] = mark;
        self.page_mut(page).used = step;
    }

    /// What the predictor thought of a page last; −∞ when it never did.
    pub(crate) fn score(&self, page: u32) -> f32 {
        self.page(page).score
    }

    /// What the predictor thinks of a page.
    pub(crate) fn rate(&mut self, page: u32, score: f32) {
        self.page_mut(page).score = score;
    }

    /// Slots whose keys are projected.
    pub(crate) fn projected(&self, page: u32) -> u32 {
        self.page(page).projected
    }

    /// The slots before `end` are being projected: returns how many of them were before.
    pub(crate) fn project(&mut self, page: u32, end: u32) -> u32 {
        let entry = self.page_mut(page);
        let before = entry.projected;
        entry.projected = before.max(end);
        before
    }

    /// No slot's key counts as projected any more.
    pub(crate) fn forget_projection(&mut self, page: u32) {
        self.page_mut(page).projected = 0;
    }

    /// The page begins to travel to the tier.
    pub(crate) fn depart(&mut self, page: u32) {
        self.page_mut(page).travel = Travel::Out;
    }

    /// The tier has acknowledged the page, or not (`None`).
    pub(crate) fn departed(&mut self, page: u32, copy: Option<(u32, u64)>) {
        let entry = self.page_mut(page);
        entry.travel = Travel::No;
        if let Some((slot, generation)) = copy {
            (entry.slot, entry.generation) = (slot, generation);
            self.clean += 1;
            self.changed = true;
        }
    }

    /// Pages of the tier get frames to come back to, side by side where possible; there must be as many free ones. Returns the
    /// frames and the newest mark that their former users came before.
    pub(crate) fn arrive(&mut self, pages: &[u32]) -> (Vec<u32>, u64) {
        let run = if pages.len() > 1 { self.frames.take_run(pages.len() as u32) } else { None };
        let frames: Vec<u32> = match run {
            Some(run) => {
                pages.iter().zip(&run).for_each(|(&page, &frame)| self.hold(page, frame));
                run
            }
            None => {
                let before = std::iter::once(None).chain(pages.iter().copied().map(Some));
                pages.iter().zip(before).map(|(&page, before)| self.settle(page, before)).collect()
            }
        };
        for &page in pages {
            let entry = self.page_mut(page);
            (entry.travel, entry.streamed) = (Travel::In, true);
        }
        let newest = frames.iter().map(|&frame| self.marks[self.frames.dense(frame)]).max().unwrap_or(0);
        (frames, newest)
    }

    /// The page is in its frame, or has failed to come.
    pub(crate) fn arrived(&mut self, page: u32, well: bool) {
        if well {
            self.page_mut(page).travel = Travel::No;
            self.clean += 1;
            self.changed = true;
        } else {
            self.vacate(page);
            self.page_mut(page).travel = Travel::No;
        }
    }

    /// The page may be written out although it is partial.
    pub(crate) fn complete(&mut self, page: u32) {
        self.page_mut(page).full = true;
    }

    /// Checks that frames and pages agree about each other, and the counters with both.
    #[cfg(any(test, feature = "conformance"))]
    pub(crate) fn is_consistent(&self) -> bool {
        let held = self.holders.iter().enumerate().filter(|(_, page)| **page != NONE);
        let agree = held.clone().all(|(dense, &page)| {
            let frame = self.page(page).frame;
            frame != NONE && self.frames.dense(frame) == dense && self.frames.owners(frame) == 1
        });
        let with_frame = self.pages.iter().filter(|page| page.frame != NONE).count();
        let clean = |page: &&Page| page.frame != NONE && page.slot != NONE && page.travel != Travel::In;
        agree
            && held.count() == with_frame
            && self.frames.capacity() - self.frames.free() == with_frame as u64
            && self.pages.iter().filter(clean).count() as u64 == self.clean
            && self.pages.iter().filter(|page| page.pins > 0).count() as u64 == self.pinned
            && self.frames.is_consistent()
    }
}
