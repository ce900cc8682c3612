//! KVM's binary statistics (`KVM_GET_STATS_FD`, Linux `Documentation/virt/kvm/api.rst` 4.132),
//! found by their descriptors' names, never by offset.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use serde::Serialize;

/// `_IO(KVMIO, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// Bytes of `struct kvm_stats_header`.
const HEADER_BYTES: usize = 24;
/// Bytes of `struct kvm_stats_desc` before its name.
const DESCRIPTOR_BYTES: usize = 16;
/// More than any kernel has; keeps a nonsensical header from costing memory.
const MAX_TABLE_BYTES: usize = 1 << 20;

/// One statistic's value: a number, or the buckets of a histogram.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A counter or an instantaneous value.
    Number(u64),
    /// Histogram buckets.
    Buckets(Vec<u64>),
}

/// All statistics of a VM or a vCPU by name.
pub type Values = BTreeMap<String, Value>;

#[derive(Debug, PartialEq, Eq)]
struct Descriptor {
    name: String,
    offset: usize,
    values: usize,
}

/// The statistics file of one VM or vCPU, its descriptors read once.
#[derive(Debug)]
pub struct KvmStats {
    file: File,
    descriptors: Vec<Descriptor>,
    data_offset: u64,
    data_bytes: usize,
}

impl KvmStats {
    /// Opens the statistics of the VM or vCPU `of`.
    ///
    /// # Errors
    /// This KVM has none (before Linux 5.14), or their format is not the documented one.
    pub fn open(of: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the request takes no argument and returns a new descriptor or an error.
        let fd = unsafe { libc::ioctl(of.as_raw_fd(), KVM_GET_STATS_FD) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just returned by the kernel, owned by nobody else.
        let file = unsafe { File::from_raw_fd(fd) };
        let mut header = [0; HEADER_BYTES];
        file.read_exact_at(&mut header, 0)?;
        let header = Header::parse(&header);
        let table_bytes = header.table_bytes().filter(|&bytes| bytes <= MAX_TABLE_BYTES);
        let mut table = vec![0; table_bytes.ok_or_else(bad_format)?];
        file.read_exact_at(&mut table, u64::from(header.desc_offset))?;
        let descriptors = header.descriptors(&table).ok_or_else(bad_format)?;
        let data_bytes = descriptors.iter().map(|d| d.offset + 8 * d.values).max().unwrap_or(0);
        if data_bytes > MAX_TABLE_BYTES {
            return Err(bad_format());
        }
        Ok(Self { file, descriptors, data_offset: u64::from(header.data_offset), data_bytes })
    }

    /// Reads all values now.
    ///
    /// # Errors
    /// The kernel refused the read.
    pub fn read(&self) -> io::Result<Values> {
        let mut data = vec![0; self.data_bytes];
        self.file.read_exact_at(&mut data, self.data_offset)?;
        let number = |at: usize| u64_at(&data, at).unwrap_or(0);
        Ok(self
            .descriptors
            .iter()
            .map(|d| {
                let value = match d.values {
                    1 => Value::Number(number(d.offset)),
                    n => Value::Buckets((0..n).map(|i| number(d.offset + 8 * i)).collect()),
                };
                (d.name.clone(), value)
            })
            .collect())
    }
}

fn bad_format() -> io::Error {
    io::Error::other("KVM's statistics do not have the documented format")
}

#[derive(Debug)]
struct Header {
    name_size: usize,
    num_desc: usize,
    desc_offset: u32,
    data_offset: u32,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        let word = |at| u32_at(bytes, at).unwrap_or(0);
        Self {
            name_size: word(4) as usize,
            num_desc: word(8) as usize,
            desc_offset: word(16),
            data_offset: word(20),
        }
    }

    fn table_bytes(&self) -> Option<usize> {
        self.num_desc.checked_mul(DESCRIPTOR_BYTES.checked_add(self.name_size)?)
    }

    fn descriptors(&self, table: &[u8]) -> Option<Vec<Descriptor>> {
        table
            .chunks_exact(DESCRIPTOR_BYTES + self.name_size)
            .map(|entry| {
                let name = entry.get(DESCRIPTOR_BYTES..)?;
                let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
                Some(Descriptor {
                    name: String::from_utf8_lossy(name.get(..end)?).into_owned(),
                    offset: u32_at(entry, 8)? as usize,
                    values: usize::from(u16_at(entry, 6)?).max(1),
                })
            })
            .collect()
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, offset: u32, values: u16) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        bytes.extend(0i16.to_ne_bytes());
        bytes.extend(values.to_ne_bytes());
        bytes.extend(offset.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        let mut name = name.as_bytes().to_vec();
        name.resize(8, 0);
        bytes.extend(name);
        bytes
    }

    #[test]
    fn descriptors_are_read_by_name_in_any_order() {
        let header = Header { name_size: 8, num_desc: 2, desc_offset: 0, data_offset: 0 };
        let table = [entry("hist", 8, 32), entry("exits", 0, 1)].concat();
        assert_eq!(header.table_bytes(), Some(table.len()));
        let found = header.descriptors(&table).unwrap();
        assert_eq!(found[0], Descriptor { name: "hist".into(), offset: 8, values: 32 });
        assert_eq!(found[1], Descriptor { name: "exits".into(), offset: 0, values: 1 });
    }

    #[test]
    fn this_machines_kvm_counts_exits_and_halts_of_a_vcpu() {
        let kvm = kvm_ioctls::Kvm::new().expect("this test needs /dev/kvm");
        let vm = kvm.create_vm().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let values = KvmStats::open(&vcpu).unwrap().read().unwrap();
        assert_eq!(values.get("exits"), Some(&Value::Number(0)));
        assert!(matches!(values.get("halt_wait_hist"), Some(Value::Buckets(b)) if b.len() == 32));
    }
}
