//! Interrupt messages: what travels between local APICs, I/O APIC and devices, and how it is
//! written in an MSI, an interrupt command register and a redirection entry. The three share the
//! layout of the low word (Intel SDM vol. 3, 11.6.1 and 11.11; 82093AA, 3.2.4).

use crate::irq::MsiMessage;

/// Every local APIC, as a physical or logical destination.
pub(super) const BROADCAST: u32 = u32::MAX;
/// Vectors below this one are reserved, and illegal in a message (SDM 11.5.2).
pub(super) const FIRST_LEGAL_VECTOR: u8 = 16;

// Fields of the low word.
const DELIVERY_MODE_SHIFT: u32 = 8;
const DELIVERY_MODE_MASK: u32 = 0x7;
const LOGICAL: u32 = 1 << 11;
const ASSERT: u32 = 1 << 14;
const LEVEL: u32 = 1 << 15;
const SHORTHAND_SHIFT: u32 = 18;
const SHORTHAND_MASK: u32 = 0x3;

// An MSI's address (SDM 11.11.1).
const MSI_ADDRESS_MASK: u64 = 0xffff_ffff_fff0_0000;
const MSI_ADDRESS: u64 = 0xfee0_0000;
const MSI_DESTINATION_SHIFT: u64 = 12;
const MSI_REDIRECTION_HINT: u64 = 1 << 3;
const MSI_LOGICAL: u64 = 1 << 2;

/// What a message asks its receiver to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryMode {
    /// Take the vector.
    Fixed,
    /// The same, but only one of the destinations: one of those with the lowest task priority.
    LowestPriority,
    /// System management interrupt; there is no such mode in this machine.
    Smi,
    /// Non-maskable interrupt.
    Nmi,
    /// Reset the processor, which then waits for a start-up message.
    Init,
    /// Start the processor at the page that the vector names.
    StartUp,
    /// Ask an 8259 for the vector; this machine has none.
    ExtInt,
}

impl DeliveryMode {
    /// The mode in bits 10:8; `None` for the reserved one.
    fn from_low_word(word: u32) -> Option<Self> {
        Some(match word >> DELIVERY_MODE_SHIFT & DELIVERY_MODE_MASK {
            0 => DeliveryMode::Fixed,
            1 => DeliveryMode::LowestPriority,
            2 => DeliveryMode::Smi,
            4 => DeliveryMode::Nmi,
            5 => DeliveryMode::Init,
            6 => DeliveryMode::StartUp,
            7 => DeliveryMode::ExtInt,
            _ => return None,
        })
    }
}

/// Which local APICs a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The one with this identifier; `0xffff_ffff` is all of them.
    Physical(u32),
    /// Those whose logical identifier matches, each by its own mode; `0xffff_ffff` is all of them.
    Logical(u32),
    /// The sender.
    Myself,
    /// All.
    All,
    /// All but the sender.
    AllButSelf,
}

impl Destination {
    /// An 8-bit destination, as MSIs, redirection entries and xAPIC commands have it.
    fn from_byte(logical: bool, id: u8) -> Self {
        let id = if id == 0xff { BROADCAST } else { id.into() };
        Destination::new(logical, id)
    }

    fn new(logical: bool, id: u32) -> Self {
        if logical { Destination::Logical(id) } else { Destination::Physical(id) }
    }
}

/// An interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupt {
    /// For whom.
    pub destination: Destination,
    /// What to do.
    pub mode: DeliveryMode,
    /// The vector; for [`DeliveryMode::StartUp`] the page to start at.
    pub vector: u8,
    /// Level triggered: its end of interrupt is told to the I/O APIC.
    pub level: bool,
}

impl Interrupt {
    /// Decodes an MSI (SDM 11.11). `None` if it asks for nothing: an address that belongs to no
    /// local APIC, the reserved delivery mode, the end of a level-triggered interrupt.
    #[inline]
    pub fn from_msi(message: MsiMessage) -> Option<Self> {
        let MsiMessage { address, data } = message;
        let level = data & LEVEL != 0;
        if address & MSI_ADDRESS_MASK != MSI_ADDRESS || level && data & ASSERT == 0 {
            return None;
        }
        let mode = match DeliveryMode::from_low_word(data)? {
            DeliveryMode::Fixed if address & MSI_REDIRECTION_HINT != 0 => {
                DeliveryMode::LowestPriority
            }
            mode => mode,
        };
        let id = (address >> MSI_DESTINATION_SHIFT) as u8;
        let destination = Destination::from_byte(address & MSI_LOGICAL != 0, id);
        Some(Interrupt { destination, mode, vector: data as u8, level })
    }

    /// Decodes a redirection entry of an I/O APIC. `None` for the reserved delivery mode.
    pub(super) fn from_redirection(entry: u64) -> Option<Self> {
        let word = entry as u32;
        Some(Interrupt {
            destination: Destination::from_byte(word & LOGICAL != 0, (entry >> 56) as u8),
            mode: DeliveryMode::from_low_word(word)?,
            vector: word as u8,
            level: word & LEVEL != 0,
        })
    }

    /// Decodes an interrupt command in the xAPIC's form, destination in bits 63:56.
    pub(super) fn from_xapic_command(command: u64) -> Option<Self> {
        Self::from_command(command as u32, |logical| {
            Destination::from_byte(logical, (command >> 56) as u8)
        })
    }

    /// Decodes an interrupt command in the x2APIC's form, destination in bits 63:32.
    #[inline]
    pub(super) fn from_x2apic_command(command: u64) -> Option<Self> {
        Self::from_command(command as u32, |logical| {
            Destination::new(logical, (command >> 32) as u32)
        })
    }

    /// `None` if the command asks for nothing: the reserved delivery mode, or the de-assertion of
    /// INIT, which only synchronised arbitration of processors long gone (SDM 11.6.1). IPIs are
    /// always edge triggered otherwise.
    fn from_command(word: u32, destination: impl Fn(bool) -> Destination) -> Option<Self> {
        let mode = DeliveryMode::from_low_word(word)?;
        if mode == DeliveryMode::Init && word & LEVEL != 0 && word & ASSERT == 0 {
            return None;
        }
        let destination = match word >> SHORTHAND_SHIFT & SHORTHAND_MASK {
            0 => destination(word & LOGICAL != 0),
            1 => Destination::Myself,
            2 => Destination::All,
            _ => Destination::AllButSelf,
        };
        Some(Interrupt { destination, mode, vector: word as u8, level: false })
    }

    /// Whether the message carries a vector that must be legal.
    pub(super) fn has_illegal_vector(&self) -> bool {
        matches!(self.mode, DeliveryMode::Fixed | DeliveryMode::LowestPriority)
            && self.vector < FIRST_LEGAL_VECTOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn msi(address: u64, data: u32) -> Option<Interrupt> {
        Interrupt::from_msi(MsiMessage { address, data })
    }

    #[test]
    fn an_msi_names_destination_mode_and_vector() {
        let plain = Interrupt {
            destination: Destination::Physical(3),
            mode: DeliveryMode::Fixed,
            vector: 0x41,
            level: false,
        };
        assert_eq!(msi(0xfee0_3000, 0x41), Some(plain));
        assert_eq!(
            msi(0xfee0_3004, 0x41),
            Some(Interrupt { destination: Destination::Logical(3), ..plain })
        );
        assert_eq!(
            msi(0xfeef_f000, 0x41),
            Some(Interrupt { destination: Destination::Physical(BROADCAST), ..plain })
        );
        assert_eq!(msi(0xfee0_3000, 0xc041), Some(Interrupt { level: true, ..plain }));
        let modes = [(0x100, DeliveryMode::LowestPriority), (0x400, DeliveryMode::Nmi)];
        for (bits, mode) in modes {
            assert_eq!(msi(0xfee0_3000, 0x41 | bits), Some(Interrupt { mode, ..plain }));
        }
    }

    #[test]
    fn a_redirection_hint_asks_for_one_of_the_destinations() {
        assert_eq!(msi(0xfee0_300c, 0x41).unwrap().mode, DeliveryMode::LowestPriority);
        assert_eq!(msi(0xfee0_300c, 0x441).unwrap().mode, DeliveryMode::Nmi);
    }

    #[test]
    fn an_msi_that_asks_for_nothing_is_none() {
        assert_eq!(msi(0xfee0_3000, 0x8041), None, "level, not asserted");
        assert_eq!(msi(0xfee0_3000, 0x341), None, "reserved delivery mode");
        for address in [0, 0xfed0_3000, 0xfef0_3000, 0x1_fee0_3000, u64::MAX] {
            assert_eq!(msi(address, 0x41), None, "{address:#x}");
        }
    }

    #[test]
    fn both_forms_of_a_command_differ_in_the_destination_only() {
        let xapic = |command| Interrupt::from_xapic_command(command).unwrap().destination;
        let x2apic = |command| Interrupt::from_x2apic_command(command).unwrap().destination;
        assert_eq!(xapic(0x0200_0000_0000_00f0), Destination::Physical(2));
        assert_eq!(xapic(0xff00_0000_0000_00f0), Destination::Physical(BROADCAST));
        assert_eq!(x2apic(0x0200_0000_0000_00f0), Destination::Physical(0x0200_0000));
        assert_eq!(x2apic(0x0000_00ff_0000_08f0), Destination::Logical(0xff));
        assert_eq!(x2apic(0xffff_ffff_0000_00f0), Destination::Physical(BROADCAST));
        for (bits, shorthand) in
            [(1, Destination::Myself), (2, Destination::All), (3, Destination::AllButSelf)]
        {
            let command = 0x0200_0000_0000_00f0 | bits << SHORTHAND_SHIFT;
            assert_eq!((xapic(command), x2apic(command)), (shorthand, shorthand));
        }
    }

    #[test]
    fn init_counts_when_asserted_and_its_end_does_not() {
        let init = |bits: u64| Interrupt::from_xapic_command(0x0100_0000_0000_0500 | bits);
        assert_eq!(init(0xc000).unwrap().mode, DeliveryMode::Init, "level, asserted");
        assert_eq!(init(0x4000).unwrap().mode, DeliveryMode::Init, "edge");
        assert_eq!(init(0).unwrap().mode, DeliveryMode::Init, "edge, as some guests write it");
        assert_eq!(init(0x8000), None);
    }

    #[test]
    fn commands_are_edge_triggered_whatever_they_say() {
        assert!(!Interrupt::from_xapic_command(0xc0f0).unwrap().level);
    }

    #[test]
    fn only_messages_with_a_vector_can_have_an_illegal_one() {
        let with = |mode, vector| {
            Interrupt { destination: Destination::All, mode, vector, level: false }
                .has_illegal_vector()
        };
        assert!(with(DeliveryMode::Fixed, 15) && with(DeliveryMode::LowestPriority, 0));
        assert!(!with(DeliveryMode::Fixed, 16) && !with(DeliveryMode::StartUp, 8));
        assert!(!with(DeliveryMode::Nmi, 0));
    }
}
