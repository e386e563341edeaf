//! What has gone wrong on the device, and how long may a wait take?

use super::NAME;
use crate::{Error, Result};
use ::wgpu::{CommandBuffer, Device, ErrorFilter, PollType, Queue, SubmissionIndex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The longest wait before [`Error::Timeout`]: a software adapter may take long for one kernel.
const PATIENCE: Duration = Duration::from_secs(300);
/// The longest time between two looks at the device during a wait.
const LONGEST_NAP: Duration = Duration::from_millis(2);

/// An error of the device.
pub(super) fn device_error(message: impl ToString) -> Error {
    Error::Device { backend: NAME, message: message.to_string() }
}

/// The first failure of a device, after which every call returns it.
#[derive(Debug, Clone, Default)]
pub(super) struct Health(Arc<OnceLock<String>>);

impl Health {
    /// Fails when the device has failed before.
    pub(super) fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |message| Err(device_error(message)))
    }

    /// Notes a failure; the first one stays.
    pub(super) fn fail(&self, message: impl ToString) -> Error {
        device_error(self.0.get_or_init(|| message.to_string()))
    }

    /// Makes a device report its loss, and the errors that no scope catches, here.
    pub(super) fn watch(&self, device: &Device) {
        let health = self.clone();
        device.set_device_lost_callback(move |reason, message| {
            health.fail(format!("the device was lost ({reason:?}): {message}"));
        });
        let health = self.clone();
        device.on_uncaptured_error(Arc::new(move |error: ::wgpu::Error| {
            health.fail(error);
        }));
    }

    /// Waits until a submission has finished and `ready` holds.
    pub(super) fn wait(&self, device: &Device, submission: &Submission, ready: impl Fn() -> bool) -> Result<()> {
        let begin = Instant::now();
        while !(self.is_done(device, submission)? && ready()) {
            let waited = begin.elapsed();
            if waited > PATIENCE {
                return Err(Error::Timeout { backend: NAME, seconds: PATIENCE.as_secs() });
            }
            // Short work is met at once, long work costs the host little.
            std::thread::sleep((waited / 16).min(LONGEST_NAP));
        }
        Ok(())
    }

    /// Whether a submission has finished; returns at once.
    pub(super) fn is_done(&self, device: &Device, submission: &Submission) -> Result<bool> {
        // Not a wait with a time limit: wgpu panics when one ends just as another thread sees the queue run empty.
        self.poll(device, PollType::Poll)?;
        let done = submission.done.load(Ordering::Acquire);
        if done {
            // Says so when the submission was refused, as it is on a lost device; it has nothing left to wait for.
            self.poll(device, PollType::Wait { submission_index: Some(submission.index.clone()), timeout: None })?;
        }
        Ok(done)
    }

    /// Polls the device. wgpu panics when it finds it lost; here that is an error like any other.
    fn poll(&self, device: &Device, request: PollType) -> Result<()> {
        self.check()?;
        match catch_unwind(AssertUnwindSafe(|| device.poll(request))) {
            Ok(Ok(_)) => self.check(),
            Ok(Err(error)) => Err(self.fail(error)),
            Err(_) => Err(self.fail("polling the device failed")),
        }
    }
}

/// Commands that were handed to the queue.
#[derive(Debug, Clone)]
pub(super) struct Submission {
    index: SubmissionIndex,
    /// Set by the device when it has finished them.
    done: Arc<AtomicBool>,
}

impl Submission {
    pub(super) fn new(queue: &Queue, commands: Option<CommandBuffer>) -> Self {
        let index = queue.submit(commands);
        let done = Arc::new(AtomicBool::new(false));
        let flag = done.clone();
        queue.on_submitted_work_done(move || flag.store(true, Ordering::Release));
        Submission { index, done }
    }
}

/// Runs an action that creates or submits something and returns the error that the device reports for it.
pub(super) fn scoped<T>(device: &Device, action: impl FnOnce() -> T) -> Result<T, ::wgpu::Error> {
    let filters = [ErrorFilter::Internal, ErrorFilter::OutOfMemory, ErrorFilter::Validation];
    let scopes = filters.map(|filter| device.push_error_scope(filter));
    let value = action();
    let mut errors: Vec<_> = scopes.into_iter().rev().filter_map(|scope| pollster::block_on(scope.pop())).collect();
    errors.pop().map_or(Ok(value), Err)
}
