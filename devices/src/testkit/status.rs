//! The bits of the device status, by the numbers of the specification (virtio 1.2, 2.1), not by the
//! device's own constants.

/// ACKNOWLEDGE.
pub const ACKNOWLEDGE: u8 = 1;
/// DRIVER.
pub const DRIVER: u8 = 2;
/// DRIVER_OK.
pub const DRIVER_OK: u8 = 4;
/// FEATURES_OK.
pub const FEATURES_OK: u8 = 8;
/// DEVICE_NEEDS_RESET.
pub const NEEDS_RESET: u8 = 64;
/// FAILED.
pub const FAILED: u8 = 128;
