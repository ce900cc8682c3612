//! Checks, from the host, what `fio-verify` left on a disk: every block that fio wrote with
//! `verify=crc32c` has a header that names its offset and the checksum of its data.

/// fio checks its data in pieces of this size.
const BLOCK_BYTES: usize = 4096;
/// `FIO_HDR_MAGIC`.
const MAGIC: u16 = 0xacca;
/// The header and its own checksum.
const HEADER_BYTES: usize = 44;

/// Counts the blocks of `disk` that fio wrote.
///
/// # Errors
/// The first block whose header or data is wrong.
pub fn blocks(disk: &[u8]) -> Result<usize, String> {
    let mut found = 0;
    for (index, block) in disk.chunks_exact(BLOCK_BYTES).enumerate() {
        if u16::from_le_bytes([block[0], block[1]]) != MAGIC {
            continue;
        }
        found += 1;
        let expected = (index * BLOCK_BYTES) as u64;
        let offset = u64::from_le_bytes(block[16..24].try_into().expect("eight bytes"));
        let word =
            |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
        if offset != expected {
            return Err(format!("the block at {expected:#x} says it belongs to {offset:#x}"));
        }
        if word(36) != crc32c(&block[..36]) {
            return Err(format!("the header at {expected:#x} does not match its checksum"));
        }
        if word(40) != crc32c(&block[HEADER_BYTES..]) {
            return Err(format!("the data at {expected:#x} does not match its checksum"));
        }
    }
    Ok(found)
}

/// CRC-32C as fio has it: started with all ones, not inverted at the end.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(offset: u64) -> Vec<u8> {
        let mut block = vec![7; BLOCK_BYTES];
        block[..2].copy_from_slice(&MAGIC.to_le_bytes());
        block[16..24].copy_from_slice(&offset.to_le_bytes());
        let header = crc32c(&block[..36]);
        block[36..40].copy_from_slice(&header.to_le_bytes());
        let data = crc32c(&block[HEADER_BYTES..]);
        block[40..44].copy_from_slice(&data.to_le_bytes());
        block
    }

    #[test]
    fn crc32c_has_its_check_value() {
        assert_eq!(!crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn good_blocks_are_counted_and_bad_ones_found() {
        let good = [block(0), vec![0; BLOCK_BYTES], block(0x2000)].concat();
        assert_eq!(blocks(&good), Ok(2));
        assert!(blocks(&block(0x1000)).unwrap_err().contains("belongs to 0x1000"));
        let mut flipped = block(0);
        flipped[4000] ^= 1;
        assert!(blocks(&flipped).unwrap_err().contains("data"));
        let mut header = block(0);
        header[30] ^= 1;
        assert!(blocks(&header).unwrap_err().contains("header"));
    }
}
