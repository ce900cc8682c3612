//! PCI: configuration space, BARs, MSI-X and the root bus.

pub mod bar;
pub mod bus;
pub mod config;
pub mod msix;

/// A BAR that answers now: memory decoding is on and an address is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarMapping {
    /// BAR index, 0 to 5 (the lower half of a 64-bit BAR).
    pub bar: u8,
    /// Guest physical address.
    pub address: u64,
    /// Size in bytes, a power of two.
    pub size_bytes: u64,
}

/// A PCI function as the root bus sees it.
///
/// Accesses are at most 8 bytes, arrive from any vCPU under the device's own lock, and never
/// fail: what does not exist reads as all ones (configuration space) or zero (BARs) and ignores
/// writes. `data` is little-endian.
pub trait PciDevice: Send {
    /// Reads configuration space at `offset` (0 to 4095).
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes configuration space at `offset`. The bus compares [`mapped_bars`](Self::mapped_bars)
    /// before and after, and moves the device's windows accordingly.
    fn write_config(&mut self, offset: u16, data: &[u8]);
    /// The BARs that answer now.
    fn mapped_bars(&self) -> Vec<BarMapping>;
    /// Reads `offset` bytes into BAR `bar`.
    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]);
    /// Writes `offset` bytes into BAR `bar`.
    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]);
}
