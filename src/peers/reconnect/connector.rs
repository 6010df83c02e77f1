use std::future::pending;
use std::pin::pin;

use futures::future::{BoxFuture, select};

use super::error::ReconnectCause;
use super::policy::ReconnectPolicy;
use crate::cm::ConnectError;
use crate::connection::{CloseReason, Connection, EstablishError};
use crate::engine::{PortChanges, all_ports_are_down};
use crate::error::{OpenError, SetupError, VerbError};
use crate::peers::change_to_active_port;
use crate::verbs::Device;

pub(super) type Attempt = BoxFuture<'static, Result<Connection, EstablishError>>;

pub(super) enum Failure {
    Again(ReconnectCause),
    Permanent(ReconnectCause),
}

pub(super) struct Connector {
    dialer: Dialer,
    /// `None` without a device, or if it cannot be watched.
    changes: Option<PortChanges>,
}

enum Dialer {
    Function(Box<dyn FnMut() -> Attempt + Send>),
    Device(DeviceDialer),
}

struct DeviceDialer {
    device: Option<Device>,
    open: Box<dyn FnMut() -> Result<Device, OpenError> + Send>,
    reopens: bool,
    connect: Box<dyn FnMut(Device) -> Attempt + Send>,
}

impl Connector {
    pub(super) fn by_function(connect: impl FnMut() -> Attempt + Send + 'static) -> Self {
        Self { dialer: Dialer::Function(Box::new(connect)), changes: None }
    }

    /// After a removal, `open` is called again only if it `reopens` the device.
    pub(super) fn on_device(
        open: impl FnMut() -> Result<Device, OpenError> + Send + 'static,
        reopens: bool,
        connect: impl FnMut(Device) -> Attempt + Send + 'static,
    ) -> Self {
        let (open, connect) = (Box::new(open), Box::new(connect));
        let dialer = DeviceDialer { device: None, open, reopens, connect };
        Self { dialer: Dialer::Device(dialer), changes: None }
    }

    pub(super) fn start(&mut self) -> Result<Attempt, Failure> {
        let dialer = match &mut self.dialer {
            Dialer::Function(connect) => return Ok(connect()),
            Dialer::Device(dialer) => dialer,
        };
        let device = match &dialer.device {
            Some(device) => device,
            None => {
                let opened =
                    (dialer.open)().map_err(|error| Failure::Again(ReconnectCause::Open(error)))?;
                self.changes = PortChanges::new(&opened);
                dialer.device.insert(opened)
            }
        };
        // This attempt sees all changes so far. Only a later one ends the next wait.
        match &mut self.changes {
            Some(changes) => changes.skip(),
            None => device.read_events(),
        }
        if device.port_events().removed {
            self.changes = None;
            return Err(dialer.removed());
        }
        if all_ports_are_down(device) {
            let device = device.name().to_owned();
            return Err(Failure::Again(ReconnectCause::PortDown { device }));
        }
        Ok((dialer.connect)(device.clone()))
    }

    pub(super) fn failed(&mut self, error: EstablishError, policy: &ReconnectPolicy) -> Failure {
        if let Dialer::Device(dialer) = &mut self.dialer {
            if let Some(device) = &dialer.device {
                device.read_events();
                if device.port_events().removed {
                    self.changes = None;
                    return dialer.removed();
                }
            }
            if dialer.reopens && is_gone(&error) {
                // Some devices raise no event for a removal, and an open handle may delay it.
                (dialer.device, self.changes) = (None, None);
                return Failure::Again(ReconnectCause::Attempt(error));
            }
        }
        let again = (policy.retry_when)(&error);
        let cause = ReconnectCause::Attempt(error);
        if again { Failure::Again(cause) } else { Failure::Permanent(cause) }
    }

    pub(super) async fn device_changed(&mut self) {
        match &mut self.changes {
            Some(changes) => changes.wait_by_descriptor().await,
            None => pending().await,
        }
    }

    /// Must precede the publication of the connection, so that no later change is missed.
    pub(super) fn watch(&mut self, connection: &Connection) {
        if let Dialer::Function(_) = self.dialer {
            self.changes = PortChanges::new(connection.protection_domain().device());
        }
    }

    /// Probes the connection after each change that leaves a port active.
    pub(super) async fn ended(&mut self, connection: &Connection) -> CloseReason {
        let probing = async {
            let Some(changes) = &mut self.changes else { return pending().await };
            loop {
                change_to_active_port(changes, connection.protection_domain().device()).await;
                connection.probe();
            }
        };
        let (reason, _) = select(pin!(connection.closed()), pin!(probing)).await.factor_first();
        if let Dialer::Function(_) = self.dialer {
            // The program may wait until nothing uses the device.
            self.changes = None;
        }
        reason
    }
}

impl DeviceDialer {
    fn removed(&mut self) -> Failure {
        let device = self.device.take().map(|device| device.name().to_owned()).unwrap_or_default();
        let cause = ReconnectCause::DeviceRemoved { device };
        if self.reopens { Failure::Again(cause) } else { Failure::Permanent(cause) }
    }
}

/// The error may have other causes.
fn is_gone(error: &EstablishError) -> bool {
    let by_setup = |error: &SetupError| match error {
        SetupError::Verb(error) => error.is_device_gone(),
        _ => false,
    };
    match error {
        EstablishError::Setup(error) => by_setup(error),
        EstablishError::Connect(error) => match error {
            ConnectError::DeviceRemoved { .. } => true,
            ConnectError::Resolve { errno, .. } => *errno == VerbError::ENODEV,
            ConnectError::Setup { error, .. } => by_setup(error),
            ConnectError::Verb { error, .. } => error.is_device_gone(),
            _ => false,
        },
        _ => false,
    }
}
