//! Interrupt delivery. [`kernel`]: the in-kernel irqchip, by GSI routes and irqfds. The user-mode
//! irqchip will be the second implementation of [`devices::irq::MsiSink`].

pub mod kernel;
