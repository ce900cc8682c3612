//! The virtio block device.
