//! Bytes as a script: whoever reads values of it gets what the input says, and zeros past its end.
//!
//! Each value takes a fixed number of bytes, so that a byte that changes changes one thing.

/// What is left of an input.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// A whole input.
    pub fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `count` bytes, fewer at the end.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(count.min(self.0.len()));
        self.0 = later;
        now
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        let bytes = self.bytes(N);
        value[..bytes.len()].copy_from_slice(bytes);
        value
    }

    /// A byte.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    /// A bit: of a byte of its own.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// True once in so many values of a byte.
    pub fn rarely(&mut self, once_in: u8) -> bool {
        self.u8() % once_in == once_in - 1
    }

    /// Less than `bound`, which is at least 1; of two bytes.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::from(self.u16()) % bound
    }

    /// One of some values, which must not be none; of one byte.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::from(self.u8()) % values.len()]
    }

    /// One of `usual`, seldom any value of 8 bytes.
    pub fn usually(&mut self, usual: &[u64]) -> u64 {
        match self.u8() {
            0xf0.. => self.u64(),
            byte => usual[usize::from(byte) % usual.len()],
        }
    }
}
