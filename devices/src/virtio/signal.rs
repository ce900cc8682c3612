//! (in work)

/// (in work)
pub struct QueueSignal;
/// (in work)
pub struct DeviceSignal;
