//! The registers by which a guest ends: i8042 reset, ACPI sleep and reset registers, pvpanic.
