//! What has gone wrong on the device, and how long may a wait take?

use super::NAME;
use crate::{Error, Result};
use ::wgpu::{Device, ErrorFilter, PollError, PollStatus, PollType, SubmissionIndex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The longest wait before [`Error::Timeout`]: a software adapter may take long for one kernel.
const PATIENCE: Duration = Duration::from_secs(300);
/// A wait looks this often whether the device has failed.
const SLICE: Duration = Duration::from_millis(500);

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
    pub(super) fn wait(&self, device: &Device, submission: &SubmissionIndex, ready: impl Fn() -> bool) -> Result<()> {
        let begin = Instant::now();
        loop {
            let finished = poll(device, Some(submission), SLICE).map_err(|message| self.fail(message))?;
            self.check()?;
            if finished && ready() {
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                return Err(Error::Timeout { backend: NAME, seconds: PATIENCE.as_secs() });
            }
        }
    }

    /// Whether a submission has finished; returns at once.
    pub(super) fn is_done(&self, device: &Device, submission: &SubmissionIndex) -> Result<bool> {
        self.check()?;
        poll(device, Some(submission), Duration::ZERO).map_err(|message| self.fail(message))
    }
}

/// Polls the device; `false` when the time is over.
///
/// wgpu panics when it finds a lost device in a poll. Here that is an error like any other.
fn poll(device: &Device, submission: Option<&SubmissionIndex>, timeout: Duration) -> Result<bool, String> {
    let request = PollType::Wait { submission_index: submission.cloned(), timeout: Some(timeout) };
    match catch_unwind(AssertUnwindSafe(|| device.poll(request))) {
        Ok(Ok(PollStatus::WaitSucceeded | PollStatus::QueueEmpty)) => Ok(true),
        Ok(Ok(PollStatus::Poll) | Err(PollError::Timeout)) => Ok(false),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("waiting for the device failed".into()),
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
