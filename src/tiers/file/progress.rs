//! How far one transfer has come: what to ask for next, and what the system's answer means. Pure.

use std::io::{self, ErrorKind};
use std::ops::Range;

/// The most bytes that one I/O asks for.
pub(super) const MAX_IO: usize = 8 << 20;
/// Answers in a row that move nothing (`EINTR`, `EAGAIN`) before the transfer is given up.
const MAX_RETRIES: u32 = 1000;

/// A transfer of `total` bytes of which `done` have been moved.
#[derive(Debug, Clone)]
pub(super) struct Progress {
    done: usize,
    total: usize,
    retries: u32,
}

/// What an answer means for the transfer.
#[derive(Debug)]
pub(super) enum Answer {
    /// There is more to do.
    More,
    /// Every byte was moved.
    Done,
    /// No byte comes after these: the end of the file (reads), or a device that takes none (writes).
    End(usize),
    /// The system refused.
    Failed(io::Error),
}

impl Progress {
    pub(super) fn new(total: usize) -> Self {
        Progress { done: 0, total, retries: 0 }
    }

    /// The bytes to ask for next.
    pub(super) fn next(&self) -> Range<usize> {
        self.done..self.total.min(self.done + MAX_IO)
    }

    /// Takes the answer to a request for [`next`](Self::next).
    pub(super) fn answer(&mut self, answer: io::Result<usize>) -> Answer {
        match answer {
            Ok(bytes) if bytes > self.next().len() => {
                Answer::Failed(io::Error::other(format!("{bytes} bytes moved of {}", self.next().len())))
            }
            Ok(bytes) => {
                self.done += bytes;
                self.retries = 0;
                match (self.done == self.total, bytes) {
                    (true, _) => Answer::Done,
                    (false, 0) => Answer::End(self.done),
                    (false, _) => Answer::More,
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
                self.retries += 1;
                if self.retries < MAX_RETRIES { Answer::More } else { Answer::Failed(error) }
            }
            Err(error) => Answer::Failed(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies `source` through a reader that moves `cap` bytes a call and is interrupted every third time.
    fn copy(source: &[u8], total: usize, cap: usize) -> (Vec<u8>, Answer) {
        let (mut progress, mut target, mut calls) = (Progress::new(total), vec![0; total], 0);
        loop {
            let range = progress.next();
            calls += 1;
            let answer = if calls % 3 == 0 {
                Err(io::Error::from(if calls % 2 == 0 { ErrorKind::Interrupted } else { ErrorKind::WouldBlock }))
            } else {
                let end = range.end.min(source.len()).min(range.start + cap);
                let part = &source[range.start.min(end)..end];
                target[range.start..range.start + part.len()].copy_from_slice(part);
                Ok(part.len())
            };
            match progress.answer(answer) {
                Answer::More => {}
                end => return (target, end),
            }
        }
    }

    #[test]
    fn short_and_interrupted_transfers_go_on_where_they_stopped() {
        let source: Vec<u8> = (0..20_000u32).map(|i| (i * 7 / 3) as u8).collect();
        for cap in [1, 511, 4095, 4096, 1 << 20] {
            let (target, end) = copy(&source, source.len(), cap);
            assert!(matches!(end, Answer::Done) && target == source, "cap {cap}");
            let (_, end) = copy(&source[..19_999], 20_000, cap);
            assert!(matches!(end, Answer::End(19_999)), "cap {cap}: {end:?}");
        }
    }

    #[test]
    fn a_transfer_is_cut_at_the_largest_io() {
        let mut progress = Progress::new(2 * MAX_IO + 1);
        assert_eq!(progress.next(), 0..MAX_IO);
        assert!(matches!(progress.answer(Ok(MAX_IO)), Answer::More));
        assert!(matches!(progress.answer(Ok(MAX_IO)), Answer::More));
        assert_eq!(progress.next(), 2 * MAX_IO..2 * MAX_IO + 1);
        assert!(matches!(progress.answer(Ok(1)), Answer::Done));
    }

    #[test]
    fn errors_end_it_and_so_do_endless_interruptions_and_impossible_counts() {
        assert!(matches!(Progress::new(8).answer(Err(io::Error::from_raw_os_error(5))), Answer::Failed(_)));
        assert!(matches!(Progress::new(8).answer(Ok(9)), Answer::Failed(_)));
        let mut progress = Progress::new(8);
        let answers = std::iter::from_fn(|| match progress.answer(Err(ErrorKind::Interrupted.into())) {
            Answer::More => Some(()),
            _ => None,
        });
        assert_eq!(answers.count() as u32, MAX_RETRIES - 1);
    }
}
